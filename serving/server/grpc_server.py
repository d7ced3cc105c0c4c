"""Runs TensorFlow Serving's gRPC services on an asyncio loop."""

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

from serving.server.limits import Limits
from serving.server.manager import ModelManager
from serving.server.metrics import Metrics
from serving.server.model_service import ModelService
from serving.server.prediction_service import PredictionService
from tff_pdp.errors import ServingError


@contextlib.asynccontextmanager
async def running_grpc_server(
    manager: ModelManager, metrics: Metrics, host: str, port: int, limits: Limits
) -> AsyncIterator[int]:
    """Answers on `host:port` while the block runs, then lets running requests finish; yields the port.

    Raises:
      ServingError: if the port is taken; see `check_port`.
    """
    server = grpc.aio.server(
        interceptors=[_Decoding()],
        options=[
            # On by default, which lets two servers share a port, each getting some of the requests.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.max_bytes),
            ("grpc.max_send_message_length", -1),
        ],
    )
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        PredictionService(manager, metrics, limits), server
    )
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(manager), server)
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise ServingError(_port_message(host, port, "refused by gRPC")) from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(limits.grace_seconds)


class _Decoding(grpc.aio.ServerInterceptor):
    """Refuses bytes that are no message, for which the library would answer UNKNOWN with words of its own."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wraps the handler of a method, if there is one."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None

        def decode(message: bytes) -> Any:
            try:
                return handler.request_deserializer(message)
            except DecodeError:
                return None

        async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if request is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The request is not a message of this method.")
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(handle, decode, handler.response_serializer)


def check_port(host: str, port: int) -> None:
    """Tries the port with a plain socket: gRPC itself would print its own lines before it fails.

    Raises:
      ServingError: if the port is taken or is none.
    """
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServingError(_port_message(host, port, reason)) from error


def _port_message(host: str, port: int, reason: str) -> str:
    return f"gRPC port {port} on {host} cannot be used ({reason}); choose another, or 0."
