"""Plans couple unit, sampler, clip, noise and event.

settings: the section `privacy` of an experiment
search: what a silo repeats to choose hyper-parameters
plan: `PrivacyPlan`, and which plan suits which rows
silo_example: a silo's records
contact_graph: people and pairs in rows
user: users as wholes
"""
