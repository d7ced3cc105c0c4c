"""Keeps the registry of all runs on this computer, in all folders: the records and the possible spending of each.

records: keyed digests of records, which show that two runs use the same records
matching: finds the records that two runs have in common
entry: one run's entry, which is made from lines of the journal
entries: the registry on disk, a journal of runs and the files of digests beside it
"""
