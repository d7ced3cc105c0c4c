"""Serves the REST API and the metrics over HTTP/1.1; reads and unpacks bodies in bounded time and memory."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import prometheus_client
from aiohttp import hdrs, web

from serving.errors import INTERNAL_ERROR, RequestError, log_failure
from serving.server.metrics import Metrics
from serving.server.options import Limits
from serving.server.rest_api import RestApi, find_route, is_in_api
from serving.tf_serving import METRICS_PATH

_LOGGER = logging.getLogger(__name__)
_ENTRYPOINT = "REST"
# Sent in place of the versions of Python and libraries.
_HEADERS = {"Server": "tff_pdp"}
# How long a client that still sends a refused body is read from, so that it sees the answer.
_LINGERING_SECONDS = 2.0


@contextlib.asynccontextmanager
async def running_rest_server(
    api: RestApi, metrics: Metrics, listening: socket.socket, limits: Limits
) -> AsyncIterator[None]:
    """Serves on a bound socket while the block runs, then waits for running requests and ends idle connections."""
    server = _Server(
        _Handler(api, metrics, limits),
        # The request of a client that is gone leaves the queue.
        handler_cancellation=True,
        keepalive_timeout=limits.timeout_seconds,
        lingering_time=_LINGERING_SECONDS,
        # Bodies are unpacked by `read_body`, under a limit.
        auto_decompress=False,
        access_log=None,
        logger=_LOGGER,
    )
    runner = web.ServerRunner(server, shutdown_timeout=limits.grace_seconds)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        yield
    finally:
        await runner.cleanup()


@dataclasses.dataclass(frozen=True)
class _Handler:
    """Turns HTTP requests into calls of the API, and errors into bodies."""

    api: RestApi
    metrics: Metrics
    limits: Limits

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._answer(request)
        try:
            # Sent here and not by the library, which would wait for a client that reads nothing.
            async with asyncio.timeout(self.limits.timeout_seconds):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client is too slow") from error
        return response

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        path = request.rel_url.raw_path
        if path == METRICS_PATH and request.method == "GET":
            page = self.metrics.page()
            return web.Response(body=page, headers={**_HEADERS, "Content-Type": prometheus_client.CONTENT_TYPE_LATEST})
        if not is_in_api(path):
            return _json_error(404, "Not found")
        try:
            with self.metrics.request(_ENTRYPOINT) as observation:
                body = await read_body(request, self.limits.max_bytes, self.limits.timeout_seconds)
                route = find_route(request.method, path)
                observation.api = route.method
                return _json(200, await self.api.answer(route, body, observation))
        except RequestError as error:
            response = _json_error(error.http_status, error.message)
            if isinstance(error, BodyError):
                response.force_close()
            return response
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            log_failure(_LOGGER, f"A {request.method} request", error)
            return _json_error(500, INTERNAL_ERROR)


class _Connection(web.RequestHandler):
    """One connection; answers malformed HTTP in JSON, in place of the library's page."""

    def __init__(self, server: "_Server", **options: Any):
        super().__init__(server, **options)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._server.is_stopping:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("An error after the answer was begun.")
        if status >= 500 and exc is not None:
            log_failure(_LOGGER, "A connection", exc)
        # Below its first line the library quotes the request, at any length.
        response = _json_error(status, message.splitlines()[0] if message else INTERNAL_ERROR)
        response.force_close()
        return response


class _Server(web.Server):
    """Makes connections of the class `_Connection`, for which the library has no option."""

    is_stopping = False

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    async def shutdown(self, timeout: float | None = None) -> None:
        self.is_stopping = True
        # A connection made this moment was not waiting for its first request yet when the idle ones were ended; it
        # would be waited for until the timeout.
        await asyncio.sleep(0)
        self.pre_shutdown()
        await super().shutdown(timeout)


def _json_error(status: int, message: str) -> web.Response:
    # Not by the fast writer: it refuses text that cannot be encoded, which a message may quote.
    return _json(status, json.dumps({"error": message}).encode())


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json", headers=_HEADERS)


_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_EITHER_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


class BodyError(RequestError):
    """The error of a refused body, with the HTTP status 400, 408 or 413; the server closes the connection."""

    def __init__(self, http_status: int, message: str):
        super().__init__(_CODES[http_status], message)
        self._http_status = http_status

    @property
    def http_status(self) -> int:
        """Returns the HTTP status of the answer."""
        return self._http_status


async def read_body(request: web.BaseRequest, max_bytes: int, timeout_seconds: float) -> bytes:
    """Reads a request's body, of at most `max_bytes`, and unpacks a body that is packed with gzip or deflate.

    Raises:
      BodyError: 413 if the body is larger than `max_bytes`, packed or unpacked; 408 if it does not arrive within
        `timeout_seconds`; 400 if it is malformed.
    """
    if (request.content_length or 0) > max_bytes:
        raise BodyError(413, f"The body has {request.content_length} bytes; this server accepts {max_bytes}.")
    # A client that asks first (Expect: 100-continue) has not sent its body yet, and never sends a refused body.
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
        raise BodyError(400, f"The body ends before its {encoding} data does.")
    return unpacked


def _too_large(max_bytes: int) -> BodyError:
    return BodyError(413, f"The body is too large; this server accepts {max_bytes} bytes.")
