"""Searches hyper-parameters privately.

runs: the pivot run, the silos' repetitions, and the state of a search
tune: the whole search, in the order charge, pivot run, repetitions, selection; and the cost of the search
"""
