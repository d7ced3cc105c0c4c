"""Checks algorithms, models, kinds of raw data and privacy plans that are defined outside this package. Each function
raises an `AssertionError` that names the broken rule. An example: `testing.check_algorithm(build_my_method)`.

algorithms: small clients, and the contract of an algorithm
parts: contracts of a model, a kind of raw data, a privacy plan
"""

from tff_pdp.testing.algorithms import check_algorithm
from tff_pdp.testing.parts import check_model, check_plan, check_source

__all__ = ["check_algorithm", "check_model", "check_plan", "check_source"]
