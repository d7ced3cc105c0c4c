"""From algorithm, model and plan to TFF computations.

vectorizable: a function that brings its form for stacks
client_work: a client's round, for one and for stacks
aggregation: means, sums, noised user sums
evaluate: metrics of personal and shared weights
compose: the process
learning_process: methods without client state, as a `LearningProcess`
"""
