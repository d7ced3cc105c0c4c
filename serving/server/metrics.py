"""What the server counts, for Prometheus, under TensorFlow Serving's names where it has them.

Labels are names of models that are served, never names that a request made up, and never clients' ids.
"""

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence

import prometheus_client
from prometheus_client.core import UnknownMetricFamily
from prometheus_client.metrics_core import Metric

from serving.errors import RequestError

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_MICROSECONDS = 1e6
# TensorFlow Serving's bounds: microseconds up to about 20 minutes, and examples.
_LATENCY_BUCKETS = [10 * 1.8**power for power in range(33)]
_SIZE_BUCKETS = [2.0**power for power in range(14)]


@dataclasses.dataclass
class Observation:
    """One request being answered.

    Attributes:
      api: the method, `Predict` or over REST `predict`; stays empty where a path asks for none.
      model_name: the model that answers; stays empty where the request names none that is served.
    """

    api: str = ""
    model_name: str = ""


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
        self._request_latency = self._latency(
            ":tensorflow:serving:request_latency",
            "Distribution of wall time (in microseconds) for Tensorflow Serving request.",
            ["model_name", "API", "entrypoint"],
        )
        self._runtime_latency = self._latency(
            ":tensorflow:serving:runtime_latency",
            "Distribution of wall time (in microseconds) for Tensorflow runtime.",
            ["model_name", "API", "runtime"],
        )
        self._input_batch_size = self._size(
            ":tensorflow:serving:batching_session:input_batch_size",
            "Tracks the batch size distribution on the inputs.",
        )
        self._processed_batch_size = self._size(
            ":tensorflow:serving:batching_session:processed_batch_size",
            "Tracks the batch size distribution on processing.",
        )

    @contextlib.contextmanager
    def request(self, entrypoint: str, api: str = "") -> Iterator[Observation]:
        """Counts one request by its outcome and, if it succeeds, its time; errors pass through.

        Args:
          entrypoint: `GRPC` or `REST`.
          api: the method, where it is known from the start.

        Yields:
          What is to be filled in while the request is answered.
        """
        start, observation, status = time.perf_counter(), Observation(api), "INTERNAL"
        try:
            yield observation
            status = "OK"
            labels = observation.model_name, observation.api, entrypoint
            self._request_latency.labels(*labels).observe(_elapsed(start))
        except RequestError as error:
            status = error.code.name
            raise
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        finally:
            self._request_count.add([observation.model_name, status])

    @contextlib.contextmanager
    def runtime(self, model_name: str, api: str) -> Iterator[None]:
        """Measures the run of a signature, the wait for its batch included, as TensorFlow Serving does."""
        start = time.perf_counter()
        yield
        self._runtime_latency.labels(model_name, api, "TF1").observe(_elapsed(start))

    def load_attempt(self, name: str, version: int, ok: bool, seconds: float) -> None:
        """Counts an attempt to load a version; `serving.server.version_loader.Events`."""
        path = f"{name}/{version}"
        self._load_attempt_count.add([path, "success" if ok else "fail"])
        if ok:
            self._load_latency.add([path], int(seconds * _MICROSECONDS))

    def batch_ran(self, name: str, request_sizes: Sequence[int], num_examples: int) -> None:
        """Counts a batch.

        Args:
          name: the model that ran it.
          request_sizes: examples in each of its requests.
          num_examples: examples that were run, padding included.
        """
        for size in request_sizes:
            self._input_batch_size.labels(name).observe(size)
        self._processed_batch_size.labels(name).observe(num_examples)

    def page(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)

    def _latency(self, name: str, documentation: str, labels: Sequence[str]) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            name, documentation, labels, buckets=_LATENCY_BUCKETS, registry=self._registry
        )

    def _size(self, name: str, documentation: str) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            name, documentation, ["model_name"], buckets=_SIZE_BUCKETS, registry=self._registry
        )


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


def _elapsed(start: float) -> float:
    return (time.perf_counter() - start) * _MICROSECONDS
