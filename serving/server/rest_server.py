"""Serves the REST API and the metrics over HTTP/1.1, by aiohttp on an asyncio loop."""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from serving.errors import RequestError
from serving.production.image import METRICS_PATH
from serving.server import metrics as metrics_page
from serving.server.failures import INTERNAL_ERROR, log_failure
from serving.server.http_body import BodyError, read_body
from serving.server.limits import Limits
from serving.server.metrics import Metrics
from serving.server.rest_api import RestApi
from serving.server.rest_routes import find_route, is_in_api
from tff_pdp.errors import ServingError

_LOGGER = logging.getLogger(__name__)
_ENTRYPOINT = "REST"
# Instead of the versions of Python and libraries.
_HEADERS = {"Server": "tff_pdp"}
# After a body was refused unread, how long the client is listened to, so that it sees the answer.
_LINGERING_SECONDS = 2.0


def bind(host: str, port: int) -> socket.socket:
    """Takes a port; requests wait there until `running_rest_server`.

    Raises:
      ServingError: if the port is taken or is none.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ServingError(f"REST port {port} on {host} cannot be used ({reason}); choose another, or 0.") from error


@contextlib.asynccontextmanager
async def running_rest_server(
    api: RestApi, metrics: Metrics, listening: socket.socket, limits: Limits
) -> AsyncIterator[None]:
    """Answers on a bound socket while the block runs, then lets running requests finish and ends idle connections."""
    server = _Server(
        _Handler(api, metrics, limits),
        # The request of a client that is gone leaves the queue.
        handler_cancellation=True,
        keepalive_timeout=limits.timeout_seconds,
        lingering_time=_LINGERING_SECONDS,
        # Bodies are unpacked by `http_body`, under a limit.
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


class _Handler:
    """Turns HTTP requests into calls of the API, and errors into bodies."""

    def __init__(self, api: RestApi, metrics: Metrics, limits: Limits):
        self._api = api
        self._metrics = metrics
        self._limits = limits

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._answer(request)
        try:
            # Sent here and not by the library, which would wait for a client that takes nothing in.
            async with asyncio.timeout(self._limits.timeout_seconds):
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
            page = self._metrics.page()
            return web.Response(body=page, headers={**_HEADERS, "Content-Type": metrics_page.CONTENT_TYPE})
        if not is_in_api(path):
            return _json_error(404, "Not found")
        try:
            with self._metrics.request(_ENTRYPOINT) as observation:
                body = await read_body(request, self._limits.max_bytes, self._limits.timeout_seconds)
                route = find_route(request.method, path)
                observation.api = route.method
                return _json(200, await self._api.answer(route, body, observation))
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
    """One connection; answers what is not HTTP in JSON, instead of the library's page."""

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
        # Below its first line the library quotes what was sent, at any length.
        response = _json_error(status, message.splitlines()[0] if message else INTERNAL_ERROR)
        response.force_close()
        return response


class _Server(web.Server):
    """Makes connections of the class above, which the library has no option for."""

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
