"""Seconds per federated round: this project beside others, on the same work. `make bench` runs it."""
