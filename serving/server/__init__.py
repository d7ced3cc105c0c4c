"""A development server in TensorFlow Serving's words.

options: limits and batching
metrics: what is counted
loaded_version: one version in memory, its requests merged
versions: states of versions; which take requests; which to load
manager: loads, watches, replaces; tells of models
tensors: TensorProto and examples to arrays
json_documents: JSON as TensorFlow Serving reads and writes it
json_inputs: rows, columns and examples of JSON to arrays
rest_api: what each route answers
rest_server: over HTTP, in bounded time and memory
grpc_server: over gRPC
embedded: the server
"""
