"""Computations of the server on one row per silo where budgets differ: groups of silos, and projections.

mixtures: mixtures of Gaussians in one dimension, fitted exactly enough to count groups
groups: which silos are liberal, that is, have little noise
subspaces: the subspace of liberal updates, and projections into it
"""
