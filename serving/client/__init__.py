"""Calls model servers over gRPC or REST.

answers: the results of calls
calls: deadlines and retries of calls, and time-outs for whole answers
model_client: the base class of both clients
grpc_client: the client for gRPC
rest_client: the client for REST, which does not need TensorFlow
"""
