"""Runs published experiments, and compares results with published figures.

inputs: the raw data, and their digests
setting: data, variants, scales and published figures, read from YAML files
jobs: one job for each variant, method, epsilon and seed
workers: worker processes, and the signals that end them
run: runs one job in a worker
sweep: runs unfinished jobs on all cores, and keeps outcomes on disk
report: tables of means over seeds, beside published figures
figures: draws figures
reproduction: runs the whole command
"""
