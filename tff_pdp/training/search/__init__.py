"""A private search for hyper-parameters.

runs: the pivot run, repetitions, the state of a search
tune: charge, pivot, repeat, select; what it costs
"""
