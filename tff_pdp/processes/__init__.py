"""Builds TFF computations from algorithm, model and plan.

vectorizable: functions with a form for stacks of clients
client_work: a client's round, for one client and for stacks
aggregation: means, sums, noised user sums
evaluate: metrics of personal and shared weights
compose: all computations of a method
learning_process: federated reconstruction, as a `LearningProcess`
"""
