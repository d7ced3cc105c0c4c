"""Writes a run's spending to disk before anything is spent, so that no crash or damaged byte can hide spending.

charges: the spending that a run has reserved, as lines of a journal (`tff_pdp.journal`)
checkpoint_files: files of a checkpoint, without the arrays
releases: all spending in an experiment's folder, also of replaced runs
all_runs: all spending on the same records, in all folders
forgotten: removals of clients from an experiment
sealing: destroys a run's key and states, and keeps its record
arithmetic: hardware, software and settings that a round's rounding depends on
"""
