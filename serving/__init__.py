"""Personal models as SavedModels behind TensorFlow Serving.

errors: errors of requests; unexpected errors in the log
client_ids: keyed hashes of ids
models: `PersonalModels`: shared weights once, clients' own weights as rows
saved_model: the form of an export, and its checks
tf_serving: conventions of TensorFlow Serving; its list of models, read and written
verify: checks that an export answers correctly
export: personal models to a SavedModel
server: a development server
client: clients over gRPC and REST
production: files and rollouts for TensorFlow Serving
commands: serve, verify, client-id, deploy, rollout
__main__: the program `serving`, which has these commands
"""
