"""MR-MTL's lambda, set from released models.

theory: the best pull in private mean estimation, in closed form
estimates: curvature, variance and force, estimated from windows of rounds
lambdas: the rule that sets lambda, and its guarantee
"""
