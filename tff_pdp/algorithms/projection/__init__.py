"""Computations of the server for silos with different budgets: groups of silos, and projections of updates.

mixtures: mixtures of Gaussians in one dimension, fitted exactly enough to count groups
groups: which silos are liberal, that is, have little noise
subspaces: the subspace of liberal updates, and projections into it
"""
