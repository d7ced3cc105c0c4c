"""Measures seconds per federated round of several contenders on the same work.

workloads: models' sizes, hyperparameters and data
contender: the contender's side of a measurement
contender_process: the orchestrator's side
contenders: one program for each contender
measure: one workload, contenders' rounds interleaved
run: all workloads
table: the tables of docs/performance.md
dp_sgd_step: cost of DP in a local step
client_population: a small cohort of a large population
differing_budgets: right groups of silos, and memory, where budgets differ
"""
