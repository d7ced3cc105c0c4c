"""Privacy: plans are built on mechanisms, and mechanisms on accounting.

facts: typed facts from which privacy statements are made
accounting: what was released, and the epsilon it adds up to
mechanisms: sampling, clipping, noise and private choices
synthetic: synthetic data of one silo
plans: couple unit of protection, sampler, clip, noise and event
"""
