"""Mechanisms: what adds noise.

exact_draws: draws of the host, by whole numbers
noised_sums: sums of the host on a grid, and their noise
chacha20: a cryptographic generator inside of graphs
random_bits: bits and Gaussians from a seed
sampling: Poisson batches, and a paper's shuffled ones
per_example: sums of clipped per-example gradients
dp_sgd: DP-SGD as a gradient estimator
selection: which of several models fits best, privately
user_noise: fixed clip, adaptive clip, trees: settings
user_queries: noised sums of updates as DP queries
silo_statistics: counts and moments of a silo, bought once
feature_scaling: scales that are public or paid for
"""
