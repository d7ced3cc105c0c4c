"""The record of a run: what was spent, written before it is spent, so that neither a crash nor a damaged byte hides it.

journal: lines on disk, each chained to all before it
charges: what a run has reserved of its budget, as such lines
"""
