"""Keeps account of releases, and computes the epsilon that the releases cost together.

events: releases as `DpEvent`s with a stable text form
grid_distance: extra cost of noise on a grid, compared with ideal noise
kept: results cached on disk, and many silos computed in parallel
accountants: epsilon of releases, and the noise that a budget needs
row_influence: events and privacy losses for people, or pairs of people, in several rows
repeated_runs: event of a random number of runs, the best of which is released
budget_distributions: distributions that silos' epsilons are drawn from
budgets: the budget of each silo
calibration: number of rounds that a budget allows; the noise that two papers' code chooses, and its true epsilon
ledger: records events by scope, and refuses a round, before the round runs, if it would overspend
"""
