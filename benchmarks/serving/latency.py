"""How long one call of a loaded export takes: several exports in turn, so that what disturbs one disturbs all."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.serving.layouts import NUM_FEATURES, client_id
from serving.saved_model.servable import Servable

CALLS, WARM_UP_CALLS = 1500, 100


def measure_latencies(servables: Mapping[str, tuple[Servable, int]], batch_size: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a call by name: `p50_ms` and `p99_ms`, of batches that mix clients drawn at random.

    Args:
      servables: by name, what is called and its number of clients.
      batch_size: examples in a call, each of a client of its own.
    """
    random = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in servables}
    for call in range(WARM_UP_CALLS + CALLS):
        for name, (servable, num_clients) in servables.items():
            inputs: dict[str, Any] = {
                "client_id": np.array([client_id(n) for n in random.integers(0, num_clients, batch_size)], object),
                "x": random.standard_normal((batch_size, NUM_FEATURES), np.float32),
            }
            started = time.perf_counter()
            answer = servable.predict("", inputs)
            elapsed = time.perf_counter() - started
            assert answer["personalized"].all()
            if call >= WARM_UP_CALLS:
                seconds[name].append(elapsed)
    return {
        name: {f"p{percent}_ms": 1e3 * float(np.percentile(taken, percent)) for percent in (50, 99)}
        for name, taken in seconds.items()
    }
