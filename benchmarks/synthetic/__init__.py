"""Judges synthetic data by the records of which they were made.

marginals: one- and two-way marginals of tables, distances between them, and the noise of a direct release
tables: School and heart data as tables; marginals and models of their synthetic tables
quality: accuracy on real test images of models that are trained on synthetic images alone
"""
