"""Searches hyper-parameters privately.

runs: the pivot run, repetitions, the state of a search
tune: the whole search, in order: charge, pivot run, repetitions, selection; and its cost
"""
