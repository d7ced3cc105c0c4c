"""Counts requests, batches and loads for Prometheus, under TensorFlow Serving's names where it has them.

Labels are names of models that are served, never names that a request made up, and never clients' ids.
"""

import asyncio
import collections
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

import prometheus_client
from prometheus_client.core import UnknownMetricFamily
from prometheus_client.metrics_core import Metric

from serving.errors import RequestError

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_MICROSECONDS = 1e6
# TensorFlow Serving's bounds: microseconds up to about 20 minutes, and examples.
_LATENCY_BUCKETS = [10 * 1.8**power for power in range(33)]
_SIZE_BUCKETS = [2.0**power for power in range(14)]

Result = TypeVar("Result")


class Observation:
    """One request being answered: a block that is counted by its outcome and, if it succeeds, timed.

    Attributes:
      api: the method, `Predict` or over REST `predict`; empty where a path asks for none.
      model_name: the model that answers; empty where the request names none that is served.
    """

    __slots__ = ("_entrypoint", "_metrics", "_start", "api", "model_name")

    def __init__(self, metrics: "Metrics", entrypoint: str, api: str):
        self._metrics = metrics
        self._entrypoint = entrypoint
        self.api = api
        self.model_name = ""

    def __enter__(self) -> "Observation":
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._metrics.request_ended(self, self._entrypoint, time.perf_counter() - self._start, error)

    async def timed(self, run: Awaitable[Result]) -> Result:
        """Awaits the run of a signature and times it with the wait for its batch, as TensorFlow Serving does."""
        start = time.perf_counter()
        result = await run
        self._metrics.run_ended(self, time.perf_counter() - start)
        return result


class Metrics:
    """Counters of one server; several in one process do not mix. Safe to use from many threads."""

    def __init__(self):
        self._registry = prometheus_client.CollectorRegistry()
        self._request_count = _Counts(
            ":tensorflow:serving:request_count", "The total number of requests.", ["model_name", "status"]
        )
        self._load_attempt_count = _Counts(
            ":tensorflow:cc:saved_model:load_attempt_count",
            "The number of times a SavedModel was requested to load.",
            ["model_path", "status"],
        )
        self._load_latency = _Counts(
            ":tensorflow:cc:saved_model:load_latency",
            "Latency in microseconds for SavedModels that were successfully loaded.",
            ["model_path"],
        )
        for counts in (self._request_count, self._load_attempt_count, self._load_latency):
            self._registry.register(counts)
        self._request_latency = self._histogram(
            ":tensorflow:serving:request_latency",
            "Distribution of wall time (in microseconds) for Tensorflow Serving request.",
            ["model_name", "API", "entrypoint"],
            _LATENCY_BUCKETS,
        )
        self._runtime_latency = self._histogram(
            ":tensorflow:serving:runtime_latency",
            "Distribution of wall time (in microseconds) for Tensorflow runtime.",
            ["model_name", "API", "runtime"],
            _LATENCY_BUCKETS,
        )
        self._input_batch_size = self._histogram(
            ":tensorflow:serving:batching_session:input_batch_size",
            "Tracks the batch size distribution on the inputs.",
            ["model_name"],
            _SIZE_BUCKETS,
        )
        self._processed_batch_size = self._histogram(
            ":tensorflow:serving:batching_session:processed_batch_size",
            "Tracks the batch size distribution on processing.",
            ["model_name"],
            _SIZE_BUCKETS,
        )

    def request(self, entrypoint: str, api: str = "") -> Observation:
        """Returns the block in which one request is answered; the entry point is `GRPC` or `REST`."""
        return Observation(self, entrypoint, api)

    def request_ended(self, request: Observation, entrypoint: str, seconds: float, error: BaseException | None) -> None:
        """Counts a request, and its time if it has no error."""
        self._request_count.add((request.model_name, _status(error)))
        if error is None:
            labels = request.model_name, request.api, entrypoint
            self._request_latency.labels(*labels).observe(seconds * _MICROSECONDS)

    def run_ended(self, request: Observation, seconds: float) -> None:
        """Counts the time that a request's signature took."""
        self._runtime_latency.labels(request.model_name, request.api, "TF1").observe(seconds * _MICROSECONDS)

    def load_attempt(self, name: str, version: int, ok: bool, seconds: float) -> None:
        """Counts an attempt to load a version, which took so many seconds, warm-up included."""
        path = f"{name}/{version}"
        self._load_attempt_count.add([path, "success" if ok else "fail"])
        if ok:
            self._load_latency.add([path], int(seconds * _MICROSECONDS))

    def batch_ran(self, name: str, request_sizes: Sequence[int], num_examples: int) -> None:
        """Counts a batch of a model: the examples of each request, and all that were run, padding included."""
        sizes = self._input_batch_size.labels(name)
        for size in request_sizes:
            sizes.observe(size)
        self._processed_batch_size.labels(name).observe(num_examples)

    def page(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)

    def _histogram(
        self, name: str, documentation: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(name, documentation, labels, buckets=buckets, registry=self._registry)


class _Counts:
    """A counter without the `_total` that the library puts after names, which TensorFlow Serving's do not have."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]):
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._counts: collections.Counter[tuple[str, ...]] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, labels: Sequence[str], amount: int = 1) -> None:
        with self._lock:
            self._counts[tuple(labels)] += amount

    def collect(self) -> Iterator[Metric]:
        family = UnknownMetricFamily(self._name, self._documentation, labels=self._labels)
        with self._lock:
            counts = dict(self._counts)
        for labels, count in counts.items():
            family.add_metric(labels, count)
        yield family


def _status(error: BaseException | None) -> str:
    if error is None:
        return "OK"
    if isinstance(error, RequestError):
        return error.code.name
    return "CANCELLED" if isinstance(error, asyncio.CancelledError | ConnectionError) else "INTERNAL"
