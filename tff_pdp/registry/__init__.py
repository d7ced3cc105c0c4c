"""The registry of all runs on this computer: what each may have spent, and on whose records, in all folders.

records: keyed digests of records, which show that two runs use the same records
matching: which records two runs have in common
entry: one run's entry, and its making from lines of the journal
entries: the registry on disk, a journal of runs and the files of digests beside it
"""
