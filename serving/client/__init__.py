"""Asks model servers over gRPC or REST.

answers: the results of calls
calls: deadlines and retries of calls, and time-outs that hold for a whole answer
model_client: the interface of both clients
grpc_client: the client for gRPC
rest_client: the client for REST, which does not need TensorFlow
"""
