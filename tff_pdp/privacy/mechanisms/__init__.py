"""Mechanisms: sampling, clipping, noise and private choices.

exact_draws: draws from exact distributions on the host, and sums with exact noise
random_bits: bits and Gaussians from a seed
sampling: Poisson batches, and a paper's shuffled batches
parameters: public parameters of mechanisms
grid_noise: noise and sums on a public grid
per_example: sums of clipped per-example gradients
dp_sgd: DP-SGD as a gradient estimator
selection: a private choice of the model that fits best
user_noise: settings of fixed clip, adaptive clip and trees
user_queries: DP queries for noised sums of updates
silo_statistics: a silo's number of examples and feature moments, released once
feature_scaling: scaling by constants that are public or released with noise
"""
