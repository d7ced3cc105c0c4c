"""Measures exports, loads and calls of personal models by layout and size, and the embedded server over the network.

  make bench-serving            about 15 minutes on two cores
  python -m benchmarks.serving.run --small --output FILE

Writes `benchmarks/results/serving.json`: rows of `layout, clients, export_s, load_s, rss_mb, p50_ms, p99_ms, disk_mb`,
and the server's figures. `load_s` and `rss_mb` leave out what any process with TensorFlow takes. The latencies are of
one example; those of 64 examples are beside them. Layout `per_client` is one SavedModel for each client.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, describe_machine, python_module
from benchmarks.serving.layouts import LAYOUTS, NUM_FEATURES, build_models, client_id, measure_latencies
from serving.client.grpc_client import GrpcClient
from serving.export.exporter import export_models
from serving.export.per_client import export_per_client
from serving.export.versions import hold
from serving.models import STACKED
from serving.saved_model.servable import load_servable
from serving.verify.fresh_process import FreshProcess

OUTPUT = RESULTS / "serving.json"
CLIENTS, SMALL_CLIENTS = (10, 1_000, 10_000), (10, 100)
SEPARATE_CLIENTS, SMALL_SEPARATE_CLIENTS = (10, 50), (3,)
LOADS = 3
MODEL_NAME = "bench"
PER_CLIENT = "per_client"
# Requests to the server at a time, seconds of one measurement, and number of measurements.
CONCURRENT, SECONDS, REPETITIONS = 32, 4, 7
BATCH_SIZE, CALLS = 64, 400
_START_SECONDS = 60

Row = dict[str, Any]


def measure(folder: pathlib.Path, clients: tuple[int, ...], separate_clients: tuple[int, ...]) -> dict[str, Any]:
    """Returns all rows, and the server's figures on the largest stacked export."""
    exports: dict[tuple[str, int], list[pathlib.Path]] = {}
    rows: list[Row] = []
    for layout, num_clients, separate in [
        *((layout, number, False) for layout in LAYOUTS for number in clients),
        *((PER_CLIENT, number, True) for number in separate_clients),
    ]:
        row, versions = _export(folder / f"{layout}_{num_clients}", layout, num_clients, separate=separate)
        row |= _load_cost(versions)
        exports[layout, num_clients] = versions
        rows.append(row)
        print(json.dumps(row), flush=True)
    _add_latencies(rows, exports)
    base_path = exports[STACKED, clients[-1]][0].parent
    return {
        "machine": describe_machine(),
        "load_before": round(os.getloadavg()[0], 2),
        "rows": rows,
        "throughput": measure_throughput(base_path, MODEL_NAME),
        "protocols": measure_protocols(base_path, MODEL_NAME),
    }


def _export(folder: pathlib.Path, layout: str, num_clients: int, *, separate: bool) -> tuple[Row, list[pathlib.Path]]:
    models = build_models(STACKED if separate else layout, num_clients)
    arguments = {
        "model_name": MODEL_NAME,
        "privacy_report": {"claim": "none"},
        "model_card": {"purpose": "benchmark"},
    }
    started = time.perf_counter()
    with FreshProcess() as arguments["process"]:
        if separate:
            versions = list(export_per_client(folder, models, **arguments).values())
        else:
            with hold(folder.absolute()) as held:
                versions = [export_models(held, models, **arguments)]
    export_s = time.perf_counter() - started
    disk = sum(path.stat().st_size for version in versions for path in version.rglob("*") if path.is_file())
    return {"layout": layout, "clients": num_clients, "export_s": export_s, "disk_mb": disk / 1e6}, versions


def _load_cost(versions: list[pathlib.Path]) -> Row:
    """Returns medians over fresh processes; for many versions, which take long, the figures of one process."""
    command = python_module("benchmarks.serving.load_probe", *map(str, versions))
    costs = [
        json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
        for _ in range(LOADS if len(versions) == 1 else 1)
    ]
    return {key: statistics.median(cost[key] for cost in costs) for key in costs[0]}


def _add_latencies(rows: list[Row], exports: dict[tuple[str, int], list[pathlib.Path]]) -> None:
    """Adds latencies to rows: calls all exports alternately in one process; calls only the first of separate models."""
    loaded = {key: load_servable(versions[0]) for key, versions in exports.items()}
    callable_ = {str(key): (servable, 1 if key[0] == PER_CLIENT else key[1]) for key, servable in loaded.items()}
    one, many = measure_latencies(callable_, 1), measure_latencies(callable_, 64)
    for row in rows:
        name = str((row["layout"], row["clients"]))
        batch = {f"batch_64_{key}": value for key, value in many[name].items()}
        # A batch for a separate model cannot mix clients: it has 64 examples of one client.
        row |= {**one[name], **batch, "mixes_clients": row["layout"] != PER_CLIENT}


def measure_throughput(base_path: pathlib.Path, model_name: str) -> dict[str, Any]:
    """Returns the requests of one example per second over gRPC, 32 at a time, with and without batching: medians.

    Both servers run all the time and are asked alternately, so that a disturbance affects both.
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


def measure_protocols(base_path: pathlib.Path, model_name: str) -> dict[str, Any]:
    """Returns the milliseconds of one request of 64 examples of 64 floats: REST in rows, REST in columns, and gRPC.

    The time includes building the request and reading the answer, on both sides.
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
def running_server(base_path: pathlib.Path, model_name: str, *options: str) -> Iterator[tuple[int, int]]:
    """Runs `tff-pdp serve` in a process of its own; yields the gRPC port and the REST port."""
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
            # The server opens its ports before it loads models, and answers only afterwards.
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


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few clients, to try the benchmark out")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", default=OUTPUT, help=f"default {OUTPUT}")
    options = parser.parse_args()
    sizes = (SMALL_CLIENTS, SMALL_SEPARATE_CLIENTS) if options.small else (CLIENTS, SEPARATE_CLIENTS)
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        content = measure(pathlib.Path(folder), *sizes)
    options.output.write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps({key: content[key] for key in ("throughput", "protocols")}, indent=2))
    print(f"figures: {options.output}")


if __name__ == "__main__":
    main()
