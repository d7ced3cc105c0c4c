"""Exports personal models as SavedModels.

model_checks: checks of personal models, and estimates of an export's size
served_module: the graph that is served
signatures: functions that requests call; decoding of images
expectations: the answers that an export must give
versions: writes a version to a staging folder, then renames it; never reuses a number
exporter: exports one SavedModel for all clients
per_client: exports one SavedModel for each client
stored_models: reads the models of an export, and adds clients to models
"""
