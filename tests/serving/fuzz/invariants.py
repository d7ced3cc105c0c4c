"""What must stay true of the server's process, its log and the files around the model, whatever it is sent."""

import ctypes
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np

from tests.serving.fuzz import json_bodies, proto_messages, senders
from tests.serving.fuzz.cases import MARKER, NUMERIC_MARKER, GrpcCase, HttpCase, Oracle, ServedModel
from tests.serving.fuzz.http_paths import request
from tests.serving.fuzz.json_trees import encode

MAX_GROWTH_MEBIBYTES = 300
# Pools of threads are filled as requests come, and a connection may be on its way out.
MAX_MORE_THREADS = 32
MAX_MORE_FILES = 16
MAX_PROBE_SECONDS = 10.0
SETTLE_SECONDS = 10.0
_IN_ACCESS, _IN_OPEN = 0x1, 0x20


class ProcessWatch:
    """Memory, threads and open files of the server's process, compared with those it started with."""

    def __init__(self, process: subprocess.Popen):
        self._process = process
        self._folder = Path(f"/proc/{process.pid}")
        self.first = self.now()

    def now(self) -> dict[str, int]:
        """Current figures: `rss` and `peak` in MiB, numbers of `threads` and `files`."""
        lines = (line.split(":") for line in (self._folder / "status").read_text().splitlines())
        status = {key: value.split()[0] for key, value in lines if value.split()}
        return {
            "rss": int(status["VmRSS"]) >> 10,
            "peak": int(status["VmHWM"]) >> 10,
            "threads": int(status["Threads"]),
            "files": len(list((self._folder / "fd").iterdir())),
        }

    def problems(self, *, idle: bool) -> list[str]:
        """What is wrong now; while requests run, their connections and threads are no leak."""
        if self._process.poll() is not None:
            return [f"the server ended with exit status {self._process.returncode}"]
        now = self.now()
        limits = {"rss": MAX_GROWTH_MEBIBYTES}
        if idle:
            limits |= {"threads": MAX_MORE_THREADS, "files": MAX_MORE_FILES}
        return [
            f"{name} grew from {self.first[name]} to {now[name]}, by more than {limit}"
            for name, limit in limits.items()
            if now[name] - self.first[name] > limit
        ]

    def problems_once_settled(self, *, idle: bool) -> list[str]:
        """What stays wrong after a moment to notice that connections are gone, and free what their requests held."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (found := self.problems(idle=idle)) and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return found


class FileWatch:
    """Notices, by inotify, every opening and reading of files that no request has any business with."""

    def __init__(self, paths: Sequence[Path]):
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._paths = {}
        for path in paths:
            watch = libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_ACCESS | _IN_OPEN)
            if watch < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch", str(path))
            self._paths[watch] = path

    def problems(self) -> list[str]:
        """The files that were opened since the last call."""
        try:
            events = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return []
        found, place = set(), 0
        while place < len(events):
            watch, _, _, length = struct.unpack_from("iIII", events, place)
            found.add(self._paths.get(watch))
            place += 16 + length
        return [f"{path} was opened" for path in sorted(map(str, found))]

    def close(self) -> None:
        os.close(self._descriptor)


class Prober(threading.Thread):
    """Sends valid requests over both protocols, all the time, and insists on right answers in good time.

    Attributes:
      count: requests answered so far.
      slowest_seconds: the longest of them.
      found: what went wrong.
    """

    def __init__(self, served: ServedModel, rest_port: int, grpc_port: int, pause_seconds: float = 0.02):
        super().__init__(name="prober", daemon=True)
        self._served, self._rest_port, self._grpc_port = served, rest_port, grpc_port
        self._pause_seconds = pause_seconds
        self._done = threading.Event()
        self.count, self.slowest_seconds = 0, 0.0
        self.found: list[str] = []

    def run(self) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self._grpc_port}") as channel:
            while not self._done.wait(self._pause_seconds):
                self.probe(channel)

    def probe(self, channel: grpc.Channel) -> None:
        """Sends one request over each protocol."""
        known = list(self._served.answers)
        ids, row = [known[self.count % len(known)], MARKER], self.count % len(self._served.examples)
        expected = self._served.expected(ids, [row, row])
        body = encode(json_bodies.columns_body(self._served, ids, [row, row]))
        path = f"/v1/models/{self._served.name}:predict"
        message = proto_messages.predict_request(self._served, [*ids], [row, row]).SerializeToString()
        for case in (
            HttpCase("probe", [request("POST", path, body)], Oracle.ANSWERED, expected),
            GrpcCase("probe", proto_messages.PREDICT, message, Oracle.ANSWERED, expected),
        ):
            start = time.monotonic()
            try:
                senders.send(case, self._rest_port, self._grpc_port, channel)
            except (senders.Wrong, OSError) as error:
                self.found.append(f"a valid request failed: {error}")
            seconds = time.monotonic() - start
            self.slowest_seconds = max(self.slowest_seconds, seconds)
            if seconds > MAX_PROBE_SECONDS:
                self.found.append(f"a valid request took {seconds:.1f} s")
        self.count += 1

    def stop(self) -> None:
        """Ends the thread."""
        self._done.set()
        self.join()


class SlowSenders:
    """Connections that send one byte now and then and never finish; they must not keep anyone waiting."""

    def __init__(self, port: int, count: int):
        head = b"POST /v1/models/x:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
        self._connections = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(count)]
        for number, connection in enumerate(self._connections):
            connection.sendall(head[: 1 + number * len(head) // count] if number % 2 else head + b"\r\n{")

    def drip(self) -> None:
        """Sends a byte on each connection the server still keeps."""
        for connection in self._connections:
            try:
                connection.send(b"a")
            except OSError:
                continue

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def log_problems(log: Path) -> list[str]:
    """Values of requests, and tracebacks, that are in the server's log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    values = (MARKER, str(NUMERIC_MARKER), f"{np.float32(NUMERIC_MARKER)}")
    found = []
    for number, line in enumerate(lines, start=1):
        if any(value in line for value in values):
            found.append(f"line {number} of the log holds a value of a request: {line[:300]}")
        if line.startswith("Traceback"):
            found.append(
                f"line {number} of the log begins a traceback: {' / '.join(lines[number - 2 : number + 30])[:3000]}"
            )
        if len(line) > 20_000:
            found.append(f"line {number} of the log has {len(line)} characters: {line[:200]}")
    return found[:5]
