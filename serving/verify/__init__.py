"""Checks that an export answers correctly.

answers: comparison of answers
worker: the fresh process, which loads an export
fresh_process: the parent of this process
verify: verification of an export as a whole
"""
