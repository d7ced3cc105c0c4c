"""Adds clients after training.

examples: reads new clients' examples, from a file or a dataset
options: options of a fit
costs: puts the privacy cost of a fit on record, before the fit
gradient_fit: trains rows of personal models by gradient steps
version: reads the newest version of an export, and writes the next one
fit: fits rows as the privacy plan allows
personalize: does all steps, in order
"""
