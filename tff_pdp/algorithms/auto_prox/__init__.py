"""MR-MTL's lambda, set from released models.

theory: the best pull of private mean estimation in closed form
estimates: curvature, variance and force from windows of rounds
lambdas: observes rounds, refreshes lambda; the rule and its guarantee
"""
