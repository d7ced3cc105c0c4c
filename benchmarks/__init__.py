"""Seconds and megabytes: this project beside others, on the same work.

machine: what machine this is, where the results are, and what a command costs
rounds: seconds per federated round; `make bench`
preparing: what preparing and reading data cost; `make bench-beam`
serving: exports, loads, calls; `make bench-serving`
"""
