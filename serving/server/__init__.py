"""Runs a development server with TensorFlow Serving's APIs and error messages.

options: limits on requests, and options for merging requests into batches
metrics: counters for Prometheus
loaded_version: merges the requests of one loaded version into batches, and runs the batches
versions: loads versions; keeps the states of versions and the table of versions that answer requests
manager: loads, watches and replaces the versions of all models; describes models
tensors: converts TensorProto messages and examples to arrays
json_documents: reads and writes JSON as TensorFlow Serving does
json_inputs: converts JSON rows, columns and examples to arrays
rest_api: answers each kind of REST request
rest_server: serves the REST API over HTTP, in bounded time and memory
grpc_server: serves the gRPC services
embedded: the whole server, to be run inside a program's process
"""
