"""Checks that an export answers right.

answers: answers compared
worker: the fresh process: what it does with an export
fresh_process: its parent's side
verify: the verdict
"""
