"""Mechanisms: what adds noise.

exact_draws: draws of the host, by whole numbers, and sums noised with them
chacha20: a cryptographic generator inside of graphs
random_bits: bits and Gaussians from a seed
sampling: Poisson batches, and a paper's shuffled ones
parameters: what a mechanism is run with
grid_noise: noise and sums on a public grid
per_example: sums of clipped per-example gradients
dp_sgd: DP-SGD as a gradient estimator
selection: which of several models fits best, privately
user_noise: fixed clip, adaptive clip, trees: settings
user_queries: noised sums of updates as DP queries
silo_statistics: counts and moments of a silo, bought once
feature_scaling: scales that are public or paid for
"""
