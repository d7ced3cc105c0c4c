"""Builds TFF computations from algorithm, model and plan.

stacked_convolutions: convolutions of stacked clients, each with its own kernels, as batched matrix products
vectorizable: attaches variants for stacks (batches) of clients to functions that were written for one client
client_work: a client's computation in a round, for one client and for stacks
aggregation: means, sums, and noised sums over users
evaluate: metrics of personal and shared weights
compose: all computations of a method
learning_process: federated reconstruction, as a `LearningProcess`
"""
