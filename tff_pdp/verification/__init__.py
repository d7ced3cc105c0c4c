"""Checks what lies on disk of experiments: off line, without TensorFlow, and without writing anything.

findings: what was found of one thing
run_folder: the files of one run
epsilons: epsilons of all that is on record, computed anew
statements: what reports and exports state, beside these epsilons
experiment: everything of an experiment's folder, in order
"""
