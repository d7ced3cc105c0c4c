"""Mechanisms: what adds noise.

exact_draws: exact draws on the host, by whole numbers, and sums noised with them
chacha20: a cryptographic generator inside graphs
random_bits: bits and Gaussians from a seed
sampling: Poisson batches, and a paper's shuffled ones
parameters: public parameters of mechanisms
grid_noise: noise and sums on a public grid
per_example: sums of clipped per-example gradients
dp_sgd: DP-SGD as a gradient estimator
selection: a private choice of the model that fits best
user_noise: fixed clip, adaptive clip, trees: settings
user_queries: noised sums of updates as DP queries
silo_statistics: counts and moments of a silo, released once
feature_scaling: scales that are public or released with noise
"""
