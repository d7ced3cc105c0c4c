"""Privacy: accounting below mechanisms, and mechanisms below plans.

facts: typed facts that statements are made of
accounting: what was released, and the epsilon it adds up to
mechanisms: what adds noise
plans: unit, sampler, clip, noise and event, coupled
"""
