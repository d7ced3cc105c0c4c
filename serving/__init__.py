"""Personal models as SavedModels behind TensorFlow Serving.

errors: errors of requests; unexpected errors in the log
client_ids: keyed hashes of clients' ids
models: `PersonalModels`, which holds shared weights once and clients' own weights as rows
saved_model: the files and the graph of an export, and their checks
tf_serving: conventions of TensorFlow Serving; reads and writes its list of models
verify: checks that an export answers correctly
export: writes personal models as SavedModels
server: a development server
client: programs' access to a server, over gRPC or REST
production: files and rollouts for TensorFlow Serving
commands: the commands serve, verify, client-id, deploy and rollout
__main__: the program `serving`, which has these commands
"""
