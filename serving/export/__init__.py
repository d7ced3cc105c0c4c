"""Exports personal models as SavedModels.

model_checks: checks of personal models; estimates of the size of their export
served_module: the graph that is served
signatures: functions that requests call, with decoding of images
expectations: the answers that an export must give
versions: writes a version to a staging folder, then renames it; never reuses a number
exporter: exports one SavedModel for all clients
per_client: exports one SavedModel for each client
stored_models: reads exports back, and adds clients to them
"""
