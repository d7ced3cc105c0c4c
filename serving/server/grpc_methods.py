"""One method of a gRPC service: bytes are read as its request, and what it raises becomes the status of the call."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from serving.errors import RequestError
from serving.server.failures import INTERNAL_ERROR, log_failure

_LOGGER = logging.getLogger(__name__)

# A message travels percent-encoded, up to three times as long, in metadata of which clients accept 8 KiB.
_MAX_MESSAGE_BYTES = 2_500

Method = Callable[[Any], Awaitable[Message]]


def method_handler(request_type: type[Message], method: Method) -> grpc.RpcMethodHandler:
    """Builds what gRPC calls for one method.

    The request is read here and not by the library, which answers UNKNOWN, in words of its own, to bytes that are none.

    Args:
      request_type: the message that the method takes.
      method: answers a request; a `RequestError` ends the call with its status, anything else with INTERNAL, without
        the values of the request.
    """

    async def call(message: bytes, context: grpc.aio.ServicerContext) -> Message:
        try:
            return await method(request_type.FromString(message))
        except RequestError as error:
            code, text = error.code, error.message
        except DecodeError:
            code, text = grpc.StatusCode.INVALID_ARGUMENT, "The request is not a message of this method."
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log_failure(_LOGGER, "A gRPC request", error)
            code, text = grpc.StatusCode.INTERNAL, INTERNAL_ERROR
        await context.abort(code, text.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore"))
        raise AssertionError("abort returned")

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=_serialized)


def _serialized(response: Message) -> bytes:
    return response.SerializeToString()
