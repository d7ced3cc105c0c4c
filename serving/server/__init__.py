"""A development server with TensorFlow Serving's APIs and messages.

options: limits and batching
metrics: counters for Prometheus
loaded_version: one version in memory, its requests merged
versions: states of versions; which take requests; which to load
manager: versions loaded, watched and replaced; descriptions of models
tensors: TensorProto and examples to arrays
json_documents: JSON as TensorFlow Serving reads and writes it
json_inputs: rows, columns and examples of JSON to arrays
rest_api: answers of each route
rest_server: the REST API over HTTP, in bounded time and memory
grpc_server: the services over gRPC
embedded: the server
"""
