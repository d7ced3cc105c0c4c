"""A private search for hyper-parameters.

runs: the pivot run, repetitions, what is kept
tune: charge, pivot, repeat, select; what it costs
"""
