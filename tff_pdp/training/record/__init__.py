"""The record of a run's spending, written before it is spent, so that neither a crash nor a damaged byte hides any.

charges: what a run has reserved of its budget, as lines of a journal (`tff_pdp.journal`)
checkpoint_files: a checkpoint without its arrays
releases: all that was ever spent in an experiment's folder
all_runs: all that was ever spent on the same records, over all folders
sealing: destroys a run's key and states, keeps its record
arithmetic: what the bits of a round depend on besides the run
"""
