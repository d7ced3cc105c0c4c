"""The REST API: predict, status and metadata under `/v1/models`, in TensorFlow Serving's paths, bodies and errors."""

import http.server
import json
import logging
import re
import socket
import threading
import urllib.parse
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from serving.errors import RequestError, invalid_argument
from serving.grpc_service import metadata_response, status_response
from serving.json_tensors import format_outputs, parse_body, parse_inputs
from serving.layout import MAX_VERSION
from serving.manager import ModelManager
from tff_pdp.errors import ServingError

_LOGGER = logging.getLogger(__name__)

_API_PREFIX = "/v1/models"
# The name is a key to compare, never a path to open; it may hold anything but the characters that end it.
_PATH = re.compile(
    r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
    r"(?P<action>:predict|/metadata)?"
)
_IDLE_SECONDS = 30


class RestServer(http.server.ThreadingHTTPServer):
    """An HTTP/1.1 server with a thread for each connection, all of them joined on `server_close`."""

    daemon_threads = False
    block_on_close = True
    # Lets a restarted server take over a port in TIME_WAIT; a port someone listens on stays refused.
    allow_reuse_address = True
    allow_reuse_port = False

    def __init__(self, manager: ModelManager, host: str, port: int, max_bytes: int):
        """Binds and listens; requests wait until `serve_forever`.

        Args:
          manager: what answers.
          host: address to listen on.
          port: 0 for any free one.
          max_bytes: largest request body accepted.

        Raises:
          ServingError: if the port is taken.
        """
        self.manager = manager
        self.max_bytes = max_bytes
        self._connections: set[Any] = set()
        self._connections_lock = threading.Lock()
        try:
            super().__init__((host, port), RestHandler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServingError(
                f"REST port {port} on {host} cannot be used ({reason}); choose another, or 0."
            ) from error

    def process_request(self, request, client_address) -> None:
        """Remembers the connection, so that `server_close` can end it."""
        with self._connections_lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        """Forgets a connection that ended."""
        with self._connections_lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Ends idle keep-alive connections, then waits for their threads."""
        with self._connections_lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RD)
                except OSError:
                    _LOGGER.debug("A connection was closed by its client already.")
        super().server_close()

    def handle_error(self, request, client_address) -> None:
        """Logs a broken connection without printing a traceback."""
        _LOGGER.debug("Connection from %s ended early.", client_address, exc_info=True)


class RestHandler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "tff_pdp"
    timeout = _IDLE_SECONDS
    # Headers and body leave in two writes; waiting for the first to be acknowledged would cost 40 ms.
    disable_nagle_algorithm = True
    server: RestServer

    def do_GET(self) -> None:
        """Status and metadata."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Predict."""
        self._answer(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what the base class refuses, such as other methods, in JSON instead of its HTML page."""
        self.close_connection = True
        if code == 501:
            self._send_error(400, f"Malformed request: {self.command} {self.path}")
        else:
            self._send_error(code, message or "Bad request")

    def log_message(self, format: str, *args) -> None:
        """Requests go to the debug log, without their bodies."""
        _LOGGER.debug(format, *args)

    def _answer(self, handle) -> None:
        body = self._read_body()
        if body is None:
            return
        path = urllib.parse.urlsplit(self.path).path
        if path != _API_PREFIX and not path.startswith(f"{_API_PREFIX}/"):
            self._send_error(404, "Not found")
            return
        try:
            self._send(200, handle(path, body))
        except RequestError as error:
            self._send_error(error.http_status, error.message)
        except Exception:
            # A fault of this server, not of the request: the log gets the details, the caller does not.
            _LOGGER.exception("Request failed: %s %s", self.command, path)
            self._send_error(500, "Internal error; see the server's log.")

    def _get(self, path: str, _: bytes) -> bytes:
        if path.rstrip("/") == _API_PREFIX:
            raise invalid_argument("Missing model name in request.")
        name, version, action = self._route(path)
        if action == "/metadata":
            return _metadata_json(self.server.manager, name, version)
        if action is None:
            return _status_json(self.server.manager, name, version)
        raise self._malformed(path)

    def _post(self, path: str, body: bytes) -> bytes:
        name, version, action = self._route(path)
        if action != ":predict":
            raise self._malformed(path)
        _, servable = self.server.manager.servable(name, version)
        document = parse_body(body)
        try:
            signature = servable.signature(document.get("signature_name", ""))
        except RequestError as error:
            missing = document.get("signature_name", "") or "serving_default"
            raise invalid_argument(f'Serving signature name: "{missing}" not found in signature def') from error
        outputs = servable.predict(document.get("signature_name", ""), parse_inputs(document, signature))
        return format_outputs(outputs, rows="instances" in document)

    def _route(self, path: str) -> tuple[str, int | None, str | None]:
        match = _PATH.fullmatch(path)
        if match is None:
            raise self._malformed(path)
        if match["label"]:
            raise invalid_argument(f"Unrecognized servable version label: {urllib.parse.unquote(match['label'])}")
        # Compared as text first: turning a very long number into an int is slow.
        if match["version"] and (len(match["version"]) > 19 or int(match["version"]) > MAX_VERSION):
            raise invalid_argument(f"Failed to convert version: {match['version']} to numeric.")
        version = int(match["version"]) if match["version"] else None
        return urllib.parse.unquote(match["name"]), version, match["action"]

    def _malformed(self, path: str) -> RequestError:
        return invalid_argument(f"Malformed request: {self.command} {path}")

    def _read_body(self) -> bytes | None:
        """Reads the body, or answers an error and returns `None` if its length is missing, wrong or too large."""
        if self.headers.get("Transfer-Encoding"):
            self._refuse(411, "Send the body with a Content-Length; chunked bodies are not supported.")
            return None
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit() and len(length) <= 19):
            self._refuse(400, "Content-Length is not a number.")
            return None
        if int(length) > self.server.max_bytes:
            self._refuse(413, f"The body has {length} bytes; this server accepts {self.server.max_bytes}.")
            return None
        return self.rfile.read(int(length))

    def _refuse(self, status: int, message: str) -> None:
        """Answers without having read the body, then takes in some of it: else the client may miss the answer."""
        self.close_connection = True
        self._send_error(status, message)
        self.connection.settimeout(1)
        remaining = self.server.max_bytes
        while remaining > 0 and (chunk := self.rfile.read1(min(remaining, 1 << 16))):
            remaining -= len(chunk)

    def _send_error(self, status: int, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _metadata_json(manager: ModelManager, model_name: str, version: int | None) -> bytes:
    number, servable = manager.servable(model_name, version)
    message = _to_dict(metadata_response(model_name, number, servable))
    # The Any wrapper names its type; TensorFlow Serving leaves that out.
    for field in message["metadata"].values():
        field.pop("@type", None)
    return json.dumps(message).encode()


def _status_json(manager: ModelManager, model_name: str, version: int | None) -> bytes:
    message = _to_dict(status_response(manager, model_name, version))
    for entry in message["model_version_status"]:
        entry.setdefault("status", {"error_code": "OK", "error_message": ""})
    return json.dumps(message).encode()


def _to_dict(message: Message) -> dict[str, Any]:
    """Writes every field under its own name, zeros included, as TensorFlow Serving does."""
    return json_format.MessageToDict(
        message,
        preserving_proto_field_name=True,
        including_default_value_fields=True,  # pyright: ignore[reportCallIssue]  # Named differently from protobuf 5 on.
    )
