"""Accounting: what was released, and the epsilon it adds up to.

events: releases as `DpEvent`s with a stable text form
grid_distance: what noise on a grid costs more than ideal noise
kept: what was worked out, on disk, and many silos side by side
accountants: steps to epsilon, a budget to noise
row_influence: a person in several rows: event and privacy loss
repeated_runs: a random number of runs, the best released
budgets: who may spend how much
calibration: rounds that a noise allows; a paper's looser noise
ledger: events by scope; refuses before a round runs
"""
