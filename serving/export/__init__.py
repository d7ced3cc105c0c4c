"""Personal models to a SavedModel.

model_checks: checks and sizes of personal models
served_module: the graph that is served
signatures: what can be called, images included
expectations: what an export must answer
versions: staged, renamed, never reused
exporter: one SavedModel for all clients
per_client: one for each client
stored_models: exports read back, clients added
"""
