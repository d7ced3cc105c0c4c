"""The record of a run: what was spent, written before it is spent, so that neither a crash nor a damaged byte hides it.

journal: lines on disk, each chained to all before it
charges: what a run has reserved of its budget, as such lines
checkpoint_files: a checkpoint without its arrays
releases: what was ever spent on an experiment's records
sealing: a run's key and states are destroyed, its record stays
arithmetic: what the bits of a round depend on besides the run
"""
