"""Personal models as SavedModels behind TensorFlow Serving.

errors: how a request fails; faults of the server in the log
client_ids: keyed hashes of ids
models: `PersonalModels`: what is shared once, what is owned as rows
saved_model: the form of an export, and its checks
tf_serving: conventions of TensorFlow Serving; its list of models, read and written
verify: that an export answers right
export: personal models to a SavedModel
server: a development server
client: clients over gRPC and REST
production: files and rollouts for TensorFlow Serving
commands: serve, verify, client-id, deploy, rollout
__main__: `serving`, the door to these commands
"""
