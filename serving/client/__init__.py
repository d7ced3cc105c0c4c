"""Clients for gRPC and REST.

answers: what clients return
calls: deadline, retries, time-outs of whole answers
model_client: the interface of both clients
grpc_client: over gRPC
rest_client: over REST, without TensorFlow
"""
