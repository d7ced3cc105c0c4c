"""Keeps the record of a run's spending on disk before anything is spent: no crash or damaged byte can hide spending.

charges: what a run has reserved of its budget, as lines of a journal (`tff_pdp.journal`)
checkpoint_files: a checkpoint without its arrays
releases: all that was ever spent in an experiment's folder
all_runs: all that was ever spent on the same records, over all folders
sealing: destroys a run's key and states, and keeps its record
arithmetic: the conditions that a round's bits depend on besides the run
"""
