"""Defines privacy plans, each of which couples unit, sampler, clip, noise and event.

search: a silo's repeated runs to choose hyper-parameters
extension: the rounds of a run that ended, and further rounds with the rest of each budget
plan: `PlanSettings` and `PrivacyPlan`, with all that depends on the unit of protection
silo_noise: the noise that each silo's budget needs
silo_example: protects each record of a silo
contact_graph: protects people, or pairs of people, in several rows
user: protects each user as a whole
unprotected: protects nothing, for comparison
"""
