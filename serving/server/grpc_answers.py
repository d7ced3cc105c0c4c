"""How gRPC methods fail: with the status of a request's error, or as INTERNAL without its values."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from serving.errors import RequestError
from serving.server.failures import INTERNAL_ERROR, log_failure

_LOGGER = logging.getLogger(__name__)

# A message travels percent-encoded, up to three times as long, in metadata of which clients accept 8 KiB.
_MAX_MESSAGE_BYTES = 2_500

Response = TypeVar("Response")


async def answer(context: grpc.aio.ServicerContext, handled: Awaitable[Response]) -> Response:
    """Awaits the answer of a method, and ends the call with a status where it raises."""
    try:
        return await handled
    except RequestError as error:
        code, message = error.code, error.message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
    except asyncio.CancelledError:
        raise
    except Exception as error:
        log_failure(_LOGGER, "A gRPC request", error)
        code, message = grpc.StatusCode.INTERNAL, INTERNAL_ERROR
    await context.abort(code, message)
    raise AssertionError("abort returned")
