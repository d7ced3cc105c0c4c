"""Compares seconds and megabytes of this project and of others on the same work, and the quality of synthetic data.

machine: describes the machine; measures the cost of commands
rounds: seconds per federated round; `make bench`
preparing: costs of preparing and reading data; `make bench-beam`
serving: exports, loads, calls; `make bench-serving`
synthetic: marginals and models of synthetic data, beside the records'
"""
