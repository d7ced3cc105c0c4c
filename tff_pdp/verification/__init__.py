"""Checks the files of experiments offline: needs no TensorFlow, and writes nothing.

run_folder: checks of the files of one run
epsilons: recomputes the epsilons of all releases on record, and compares reports and exports with the results
experiment: checks of all files in an experiment's folder, in order of their dependencies
status: how far runs have come, and what they have spent
compare: the results of several runs, side by side
"""
