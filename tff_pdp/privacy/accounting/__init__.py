"""Accounting: what was released, and the epsilon it adds up to.

events: releases as `DpEvent`s with a stable text form
grid_distance: extra cost of noise on a grid, compared with ideal noise
kept: results kept on disk, and many silos computed in parallel
accountants: epsilon of steps, and noise for a budget
row_influence: a person in several rows: event and privacy loss
repeated_runs: a random number of runs, the best released
budgets: the budget of each silo
calibration: number of rounds within a budget; a paper's larger noise
ledger: events by scope; refuses to overspend before a round runs
"""
