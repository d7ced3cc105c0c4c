"""Seconds and megabytes: this project beside others, on the same work.

places: where the checkout and the results are
machine: what machine this is
measured: a command, and what it costs
rounds: seconds per federated round; `make bench`
preparing: what preparing and reading data cost; `make bench-beam`
serving: exports, loads, calls; `make bench-serving`
"""
