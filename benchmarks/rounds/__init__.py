"""Seconds per federated round of several contenders, on the same work.

workloads: models' sizes, hyperparameters and data
contender: the contender's side of a measurement
contender_process: the orchestrator's side
contenders: one program a contender
measure: one workload, one round of each contender in turn
run: all workloads
table: the tables of docs/performance.md
dp_sgd_step: what DP adds to a local step
client_population: a small cohort of a large population
"""
