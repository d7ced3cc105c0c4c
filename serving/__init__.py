"""Exports personal models as SavedModels, checks exports, and serves exports like TensorFlow Serving.

errors: errors of requests; log entries of unexpected errors
client_ids: keyed hashes of clients' ids
models: the class `PersonalModels`, which stores shared weights once, and personal weights as rows
saved_model: the files and the graph of an export, and checks of both
tf_serving: TensorFlow Serving's names and formats; reads and writes `models.config`, the list of models
verify: checks that an export answers correctly
export: writes personal models as SavedModels
server: a development server
client: calls a server from Python, over gRPC or REST
production: writes TensorFlow Serving's configuration files, and moves the labels of versions
commands: the commands serve, verify, client-id, deploy and rollout
__main__: the program `serving`, which runs the commands
"""
