"""Compares seconds and megabytes of this project and of others on the same work, and the quality of synthetic data.

machine: describes the machine; measures the cost of commands
rounds: seconds per federated round; `make bench`
preparing: costs of preparing and reading data; `make bench-beam`
population: a large population, from raw data to a server
serving: exports, loads, calls; `make bench-serving`
workers: seconds per round with clients at workers on Ray
start_up: from typing a command to the first result; `make bench-start-up`
synthetic: models that are trained on synthetic data alone, and marginals, beside the records'
"""
