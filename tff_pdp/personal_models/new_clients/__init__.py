"""Adds clients after training.

examples: new clients' examples, from a file or a dataset
options: options of a fit
costs: the cost of a fit for a silo, put on record before the fit
gradient_fit: gradient steps on rows of personal models
version: the newest version of an export read, the next one written
fit: the fit that the plan allows
personalize: all steps, in order
"""
