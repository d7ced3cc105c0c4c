"""Plans couple unit, sampler, clip, noise and event.

search: a silo's repeated runs to choose hyper-parameters
plan: `PlanSettings` and `PrivacyPlan`, with all that depends on the unit of protection
silo_example: a silo's records
contact_graph: people and pairs in rows
user: users as wholes
unprotected: no protection, for comparison
"""
