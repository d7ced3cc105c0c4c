"""Runs published experiments, and compares results with published figures.

inputs: the raw data, and their digests
setting: data, variants, scales and published figures, from files of YAML
jobs: one job for each variant, method, epsilon and seed
workers: worker processes, and signals to end them
run: one job in a worker
sweep: runs unfinished jobs on all cores, and keeps outcomes on disk
report: means over seeds beside published figures, as tables
figures: the figures
reproduction: the whole command
"""
