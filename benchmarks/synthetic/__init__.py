"""Measures how useful synthetic data are.

quality: accuracy on real test images of models that are trained on synthetic images alone
"""
