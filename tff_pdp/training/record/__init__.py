"""The record of a run: what was spent, written before it is spent, so that neither a crash nor a damaged byte hides it.

charges: what a run has reserved of its budget, as lines of a journal (`tff_pdp.journal`)
checkpoint_files: a checkpoint without its arrays
releases: what was ever spent in an experiment's folder
all_runs: the same over all folders, composed for the same records
sealing: a run's key and states are destroyed, its record stays
arithmetic: what the bits of a round depend on besides the run
"""
