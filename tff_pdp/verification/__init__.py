"""Checks what lies on disk of experiments: off line, without TensorFlow, and without writing anything.

run_folder: the files of one run, and what was found of each
epsilons: epsilons of all that is on record, computed anew, and what reports and exports state beside them
experiment: everything of an experiment's folder, in order
"""
