"""Keeps the registry of all runs on this computer, in all folders: each run's records and its maximal spending.

records: keyed digests of records, which show that two runs use the same records
matching: finds the records that two runs have in common
entry: one run's entry, read from lines of the journal
entries: the registry on disk: a journal of runs, and files of digests
"""
