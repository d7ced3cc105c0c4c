"""Clients added after training.

examples: their examples, from a file or a dataset
options: options of a fit
costs: what fitting costs a silo, on record first
gradient_fit: gradient steps on rows of personal models
version: the newest export read, the next one written
fit: the fit that the plan allows
personalize: all of it, in order
"""
