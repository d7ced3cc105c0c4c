"""The registry of all runs on this computer: what each may have spent, and on whose records, over all folders.

records: keyed digests of records, by which runs know that they are about the same ones
matching: which records two runs have in common
entry: one run's entry, and how lines of the journal make it
entries: the registry on disk, a journal of runs and the files of digests beside it
"""
