"""Runs published experiments, and compares results with published figures.

inputs: the raw data, and their digests
methods: the methods that are rows of results
setting: data, variants, scales and published figures, read from YAML files
budget: one epsilon for all clients, or named budgets that differ between silos
jobs: one job for each variant, method, budget and seed
workers: worker processes, and the signals that end them
run: runs one job in a worker
sweep: runs unfinished jobs on all cores, and keeps outcomes on disk
means: means over seeds, compared with each other
comparisons: two methods, seed by seed, with a confidence interval
tables: Markdown tables, such as the table of bytes sent and received
report: the text of a report, beside published figures
figures: draws figures
reproduction: runs the whole command
"""
