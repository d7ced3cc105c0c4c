"""Servers that answer from a script, to see what clients send and how they take failures."""

import contextlib
import dataclasses
import http.server
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

DROP = object()


@dataclasses.dataclass
class Seen:
    """What a fake server received."""

    port: int = 0
    requests: list = dataclasses.field(default_factory=list)
    connections: int = 0


@contextlib.contextmanager
def rest_server(answer: Callable[[str, str, dict | None], tuple[int, bytes] | object], port: int = 0) -> Iterator[Seen]:
    """Answers what `answer(method, path, JSON body)` returns: status and body, or `DROP` to hang up."""
    seen = Seen()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            seen.connections += 1

        def handle_request(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            seen.requests.append((self.command, self.path, body))
            reply = answer(self.command, self.path, body)
            if reply is DROP:
                self.close_connection = True
                return
            status, payload = reply
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = handle_request

        def log_message(self, *_):
            pass

    with _serving(http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler), seen):
        yield seen


@contextlib.contextmanager
def raw_server(at_once: bytes, trickling: bytes = b"") -> Iterator[Seen]:
    """Answers everything with the same bytes, the latter one by one with pauses in between, and hangs up."""
    seen = Seen()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            seen.connections += 1
            self.request.recv(2**16)
            with contextlib.suppress(OSError):
                self.request.sendall(at_once)
                for byte in trickling:
                    time.sleep(0.05)
                    self.request.sendall(bytes([byte]))

    with _serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler), seen):
        yield seen


@contextlib.contextmanager
def _serving(server: socketserver.TCPServer, seen: Seen) -> Iterator[None]:
    seen.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def grpc_server(failures: list[grpc.StatusCode], delay_seconds: float = 0.0, port: int = 0) -> Iterator[Seen]:
    """Fails with the given codes one after another, then answers with the sum of each example."""
    seen = Seen()

    class Service(prediction_service_pb2_grpc.PredictionServiceServicer):
        def Predict(self, request, context):
            seen.requests.append(request)
            time.sleep(delay_seconds)
            if len(seen.requests) <= len(failures):
                context.abort(failures[len(seen.requests) - 1], "scripted")
            response = predict_pb2.PredictResponse()
            x = tf.make_ndarray(request.inputs["x"])
            ids = tf.make_ndarray(request.inputs["client_id"])
            response.outputs["values"].CopyFrom(tf.make_tensor_proto(x.reshape(len(x), -1).sum(1)))
            response.outputs["personalized"].CopyFrom(tf.make_tensor_proto([one == b"alice" for one in ids]))
            return response

    with futures.ThreadPoolExecutor(4) as executor:
        server = grpc.server(executor)
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Service(), server)
        seen.port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield seen
        finally:
            server.stop(0.1).wait()


def sums(method: str, path: str, body: dict | None) -> tuple[int, bytes]:
    """A REST server's answer with the sum of each example, as `grpc_server`."""
    assert body is not None
    inputs = body["inputs"]
    values = [sum(example) for example in inputs["x"]]
    return 200, json.dumps(
        {"outputs": {"values": values, "personalized": [one == "alice" for one in inputs["client_id"]]}}
    ).encode()
