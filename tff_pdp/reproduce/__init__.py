"""Published experiments beside their figures.

inputs: the raw data, and which data they are
setting: data, variants, scales, and what was published: files of YAML
jobs: one job for each variant, method, epsilon and seed
workers: worker processes, and signals to end them
run: one job in a worker
sweep: unfinished jobs on all cores; outcomes on disk
report: means over seeds against what was published, as tables
figures: the figures
reproduction: the whole of it
"""
