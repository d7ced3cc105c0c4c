"""The embedded server from outside: requests per second with and without batching, and REST beside gRPC."""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured import python_module
from benchmarks.serving.layouts import NUM_FEATURES, client_id
from serving.client.grpc_client import GrpcClient

CONCURRENT, SECONDS, REPETITIONS = 32, 4, 7
BATCH_SIZE, CALLS = 64, 400
_START_SECONDS = 60


def measure_throughput(base_path: Path, model_name: str) -> dict[str, Any]:
    """Requests of one example a second from 32 at a time over gRPC, with batching and without.

    Both servers run all the time and are asked in turn, so that what disturbs one disturbs the other; medians.
    """
    rows: dict[str, list[dict[str, float]]] = {"batching": [], "no_batching": []}
    with (
        running_server(base_path, model_name) as (batching_port, _),
        running_server(base_path, model_name, "--no-batching") as (no_batching_port, _),
    ):
        for _ in range(REPETITIONS):
            for name, port in (("batching", batching_port), ("no_batching", no_batching_port)):
                arguments = (f"127.0.0.1:{port}", model_name, str(CONCURRENT), "1", str(SECONDS))
                command = python_module("benchmarks.serving.load_client", *arguments)
                rows[name].append(json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL)))
    pairs = zip(*rows.values(), strict=True)
    ratios = [batching["requests_per_s"] / without["requests_per_s"] for batching, without in pairs]
    medians = {
        name: {key: float(np.median([one[key] for one in found])) for key in found[0]} for name, found in rows.items()
    }
    return {
        "concurrent": CONCURRENT,
        "batch_size": 1,
        **medians,
        "ratio": float(np.median(ratios)),
        "ratios": sorted(ratios),
    }


def measure_protocols(base_path: Path, model_name: str) -> dict[str, Any]:
    """Milliseconds of a request of 64 examples of 64 floats, one after another: REST in rows and columns, and gRPC.

    Building the request and reading the answer are in it, on both sides.
    """
    random = np.random.default_rng(0)
    ids = [client_id(number) for number in range(BATCH_SIZE)]
    seconds: dict[str, list[float]] = {"grpc": [], "rest_columns": [], "rest_rows": []}
    with running_server(base_path, model_name) as (grpc_port, rest_port):
        rest = http.client.HTTPConnection("127.0.0.1", rest_port)
        with GrpcClient(f"127.0.0.1:{grpc_port}") as grpc, contextlib.closing(rest):
            for _ in range(CALLS):
                x = random.standard_normal((BATCH_SIZE, NUM_FEATURES), np.float32)
                answers = {}
                for name in seconds:
                    started = time.perf_counter()
                    if name == "grpc":
                        answers[name] = grpc.predict(model_name, ids, x).answers
                    else:
                        answers[name] = _ask_rest(rest, model_name, ids, x, rows=name == "rest_rows")
                    seconds[name].append(time.perf_counter() - started)
                for answer in answers.values():
                    np.testing.assert_allclose(answer, answers["grpc"], atol=1e-6)
    p50 = {name: 1e3 * float(np.median(taken)) for name, taken in seconds.items()}
    return {
        "batch_size": BATCH_SIZE,
        "floats": NUM_FEATURES,
        "p50_ms": p50,
        "rest_over_grpc": {name: p50[name] / p50["grpc"] for name in ("rest_columns", "rest_rows")},
    }


@contextlib.contextmanager
def running_server(base_path: Path, model_name: str, *options: str) -> Iterator[tuple[int, int]]:
    """`tff-pdp serve` in a process of its own; yields its gRPC and REST ports."""
    grpc_port, rest_port = _free_port(), _free_port()
    arguments = ("--model-base-path", str(base_path), "--model-name", model_name)
    ports = ("--grpc-port", str(grpc_port), "--rest-port", str(rest_port))
    command = python_module("tff_pdp.cli", "serve", *arguments, *ports, *options)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_open(process, rest_port)
        yield grpc_port, rest_port
    finally:
        process.terminate()
        process.wait()


def _ask_rest(
    connection: http.client.HTTPConnection, model_name: str, ids: list[str], x: np.ndarray, *, rows: bool
) -> np.ndarray:
    values = x.tolist()
    if rows:
        body = {"instances": [{"client_id": one, "x": own} for one, own in zip(ids, values, strict=True)]}
    else:
        body = {"inputs": {"client_id": ids, "x": values}}
    connection.request("POST", f"/v1/models/{model_name}:predict", json.dumps(body))
    answer = json.loads(connection.getresponse().read())
    if rows:
        return np.array([row["probabilities"] for row in answer["predictions"]])
    return np.array(answer["outputs"]["probabilities"])


def _wait_until_open(process: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            # Ports are taken before models are loaded; an answer comes only after.
            probe.settimeout(_START_SECONDS)
            probe.sendall(b"GET /v1/models/none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            if probe.recv(1):
                return
        time.sleep(0.1)
    raise RuntimeError(f"{sys.executable} -m tff_pdp.cli serve did not answer on port {port}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
