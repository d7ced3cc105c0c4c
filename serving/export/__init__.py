"""Exports personal models as SavedModels.

model_checks: checks and sizes of personal models
served_module: the graph that is served
signatures: functions that requests call, images included
expectations: right answers of an export
versions: versions staged, then renamed; numbers never reused
exporter: one SavedModel for all clients
per_client: one SavedModel for each client
stored_models: exports read back, clients added
"""
