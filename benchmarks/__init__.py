"""Seconds and megabytes: this project beside others, on the same work.

machine: what machine this is, and where the results are
measured: a command, and what it costs
rounds: seconds per federated round; `make bench`
preparing: what preparing and reading data cost; `make bench-beam`
serving: exports, loads, calls; `make bench-serving`
"""
