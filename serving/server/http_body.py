"""Bodies of HTTP requests: read in bounded time and memory, unpacked in bounded memory."""

import asyncio
import zlib

import grpc
from aiohttp import hdrs, web

from serving.errors import RequestError

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_EITHER_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


class BodyError(RequestError):
    """A body that is not taken in, after which the connection is of no use.

    Attributes:
      code: what the request is counted as; HTTP has statuses of its own for bodies.
      message: why.
    """

    def __init__(self, http_status: int, message: str):
        super().__init__(_CODES[http_status], message)
        self._http_status = http_status

    @property
    def http_status(self) -> int:
        """The HTTP status to answer."""
        return self._http_status


async def read_body(request: web.BaseRequest, max_bytes: int, timeout_seconds: float) -> bytes:
    """Reads a body, of known length or in chunks, packed by gzip or not.

    Args:
      request: whose body; the server must not unpack bodies itself.
      max_bytes: largest body accepted, packed and unpacked.
      timeout_seconds: how long it may take to arrive.

    Raises:
      BodyError: 413 if it is too large, 408 if it is too slow, 400 if it cannot be unpacked.
    """
    if (request.content_length or 0) > max_bytes:
        raise BodyError(413, f"The body has {request.content_length} bytes; this server accepts {max_bytes}.")
    # A client that asks first has not sent a body that is refused by its length.
    if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_seconds):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as error:
        raise BodyError(408, f"The body did not arrive within {timeout_seconds:g} seconds.") from error
    except web.RequestPayloadError as error:
        raise BodyError(400, "The body is cut short or its chunks are malformed.") from error
    return _unpacked(bytes(body), request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower(), max_bytes)


def _unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise BodyError(400, f"Content-Encoding {encoding[:32]} is not supported; use gzip.")
    unpacker = zlib.decompressobj(_EITHER_GZIP_OR_ZLIB)
    try:
        # One byte more than accepted tells a body that is too large from one that is not.
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise BodyError(400, f"The body is not {encoding}.") from error
    if len(unpacked) > max_bytes:
        raise _too_large(max_bytes)
    if not unpacker.eof:
        raise BodyError(400, f"The body is not all of its {encoding}.")
    return unpacked


def _too_large(max_bytes: int) -> BodyError:
    return BodyError(413, f"The body is too large; this server accepts {max_bytes} bytes.")
