"""Building blocks of personalised methods: pure functions, independent of privacy plans and of TFF.

hyper_parameters: `HParam`, `Steps`, and hooks that set them during training
base: `Algorithm`, the interface of all methods; `GradFn`; functions on weights
local_sgd: the local solver
minibatch: the plain gradient estimator
server_optimizer: how the server applies a mean update
clustering: one model per cluster, private selection, sums by cluster
partial_sharing: a shared body, and a head per client
auto_prox: MR-MTL's lambda, set from released models
projection: groups of silos with different budgets, and subspaces of their updates
whole_models: methods whose clients own a whole model, or share one
shared_parts: methods whose clients share a part of their models
meta_learning: methods that train a shared start for a few local steps
phases: rounds on synthetic data by any method, then rounds on records
"""
