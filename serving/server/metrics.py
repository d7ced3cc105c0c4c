"""Counts requests, batches and loads for Prometheus, under the names of TensorFlow Serving's metrics.

The labels of metrics may contain names of served models, but no other names from requests and no clients' ids.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeVar

import prometheus_client
from prometheus_client.core import UnknownMetricFamily
from prometheus_client.metrics_core import Metric

from serving.errors import RequestError

_MICROSECONDS = 1e6
# TensorFlow Serving's bounds: microseconds up to about 20 minutes, and examples.
_LATENCY_BUCKETS = [10 * 1.8**power for power in range(33)]
_SIZE_BUCKETS = [2.0**power for power in range(14)]

Result = TypeVar("Result")


@dataclasses.dataclass(eq=False, slots=True)
class Observation:
    """A request that is being answered, with the labels of its metrics.

    Attributes:
      runtime_latency: histogram of the times that signatures took to run.
      api: name of the method, such as `Predict` over gRPC or `predict` over REST; empty until the method is known.
      model_name: name of the model that answers; empty until the model is found.
    """

    runtime_latency: prometheus_client.Histogram
    api: str
    model_name: str = ""

    async def timed(self, run: Awaitable[Result]) -> Result:
        """Awaits a signature's run and records its time, including the wait for a batch, as TensorFlow Serving does."""
        start = time.perf_counter()
        result = await run
        seconds = time.perf_counter() - start
        self.runtime_latency.labels(self.model_name, self.api, "TF1").observe(seconds * _MICROSECONDS)
        return result


class Metrics:
    """The metrics of one server; other servers in the process have their own. Many threads may use one object."""

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
        histogram = functools.partial(prometheus_client.Histogram, registry=self._registry)
        latency, size = (functools.partial(histogram, buckets=one) for one in (_LATENCY_BUCKETS, _SIZE_BUCKETS))
        self._request_latency = latency(
            ":tensorflow:serving:request_latency",
            "Distribution of wall time (in microseconds) for Tensorflow Serving request.",
            ["model_name", "API", "entrypoint"],
        )
        self._runtime_latency = latency(
            ":tensorflow:serving:runtime_latency",
            "Distribution of wall time (in microseconds) for Tensorflow runtime.",
            ["model_name", "API", "runtime"],
        )
        self._input_batch_size = size(
            ":tensorflow:serving:batching_session:input_batch_size",
            "Tracks the batch size distribution on the inputs.",
            ["model_name"],
        )
        self._processed_batch_size = size(
            ":tensorflow:serving:batching_session:processed_batch_size",
            "Tracks the batch size distribution on processing.",
            ["model_name"],
        )

    @contextlib.contextmanager
    def request(self, entrypoint: str, api: str = "") -> Iterator[Observation]:
        """Counts the request that the `with` block answers, by status; records the time of a successful request."""
        observation, start = Observation(self._runtime_latency, api), time.perf_counter()
        try:
            yield observation
        except BaseException as error:
            self._request_count.add((observation.model_name, _status(error)))
            raise
        seconds = time.perf_counter() - start
        self._request_count.add((observation.model_name, "OK"))
        labels = observation.model_name, observation.api, entrypoint
        self._request_latency.labels(*labels).observe(seconds * _MICROSECONDS)

    def load_attempt(self, name: str, version: int, ok: bool, seconds: float) -> None:
        """Counts an attempt to load a version; `seconds` is the time of the attempt, including the warm-up."""
        path = f"{name}/{version}"
        self._load_attempt_count.add([path, "success" if ok else "fail"])
        if ok:
            self._load_latency.add([path], int(seconds * _MICROSECONDS))

    def batch_ran(self, name: str, request_sizes: Sequence[int], num_examples: int) -> None:
        """Records a batch: the number of examples in each request, and in the whole batch with its padding."""
        sizes = self._input_batch_size.labels(name)
        for size in request_sizes:
            sizes.observe(size)
        self._processed_batch_size.labels(name).observe(num_examples)

    def page(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)


@dataclasses.dataclass(eq=False)
class _Counts:
    """A counter without the `_total` that the library puts after names, which TensorFlow Serving's do not have."""

    name: str
    documentation: str
    labels: Sequence[str]

    def __post_init__(self):
        self._counts: collections.Counter[tuple[str, ...]] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, labels: Sequence[str], amount: int = 1) -> None:
        with self._lock:
            self._counts[tuple(labels)] += amount

    def collect(self) -> Iterator[Metric]:
        family = UnknownMetricFamily(self.name, self.documentation, labels=self.labels)
        with self._lock:
            counts = dict(self._counts)
        for labels, count in counts.items():
            family.add_metric(labels, count)
        yield family


def _status(error: BaseException) -> str:
    if isinstance(error, RequestError):
        return error.code.name
    return "CANCELLED" if isinstance(error, asyncio.CancelledError | ConnectionError) else "INTERNAL"
