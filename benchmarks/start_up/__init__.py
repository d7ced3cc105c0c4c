"""Measures the time from typing a command to the first result.

first_round: one process that runs the demo as far as the end of the first round
run: all commands, several times each
"""
