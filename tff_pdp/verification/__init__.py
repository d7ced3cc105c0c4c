"""Checks the files of experiments offline, without TensorFlow, and without writing anything.

run_folder: checks of the files of one run
epsilons: epsilons of all releases on record, computed anew and compared with reports and exports
experiment: checks of everything in an experiment's folder, in order
"""
