"""Synthetic data of one silo, made once from one private release.

base: synthetic examples, what every generator offers, and the generators by kind
records: checks records, and pools images
sums: exact sums by class, rounded to whole steps of the noise
gaussian: one Gaussian for each class, from noised counts, means and a pooled covariance
merf: a generator network, from one noised mean embedding
conditional: parts that conditional networks share: noised class counts, and the network that makes examples
teachers: discriminators on disjoint parts of the records, and their votes
paper_datalens: what the code of the paper on DataLens does otherwise, without a guarantee
datalens: a student network that follows noised votes of teachers
cgan: a conditional network against a discriminator that learns by DP-SGD
table: tables with public columns, as arrays and back
arrays: arrays of images or features, from files and back
silo_data: an experiment's section on synthetic data, and the part of a budget for them
release: noise for a budget, the release itself, and a privacy statement of its own
"""
