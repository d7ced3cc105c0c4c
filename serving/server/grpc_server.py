"""Runs TensorFlow Serving's gRPC services on an asyncio loop."""

import contextlib
import socket
from collections.abc import AsyncIterator

import grpc

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
        options=[
            # On by default, which lets two servers share a port, each getting some of the requests.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.max_bytes),
            ("grpc.max_send_message_length", -1),
        ],
    )
    prediction, models = PredictionService(manager, metrics, limits), ModelService(manager)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", prediction.methods),
            grpc.method_handlers_generic_handler("tensorflow.serving.ModelService", models.methods),
        )
    )
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise ServingError(_port_message(host, port, "refused by gRPC")) from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(limits.grace_seconds)


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
