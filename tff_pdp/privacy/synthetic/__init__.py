"""Synthetic data of one silo, made once from one private release.

base: synthetic examples, what every generator offers, and the generators by kind
records: checks records, and pools images
sums: exact sums by class, rounded to whole steps of the noise
gaussian: one Gaussian for each class, from noised counts, means and a pooled covariance
merf: a generator network, from one noised mean embedding
table: tables with public columns, as arrays and back
arrays: arrays of images or features, from files and back
release: noise for a budget, the release itself, and a privacy statement of its own
"""
