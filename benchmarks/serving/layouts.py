"""Builds models to export, and measures the time of one call of a loaded export.

The models are one network with a head for every client, in every layout, with random weights. Loaded exports are called
alternately, so that a disturbance affects all of them.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from serving.models import CLUSTERS, HYPERNETWORK, STACKED, PersonalModels
from serving.saved_model.servable import Servable
from tff_pdp.models.base import Model
from tff_pdp.models.dense import build_mlp
from tff_pdp.models.hypernetwork import Hypernetwork

NUM_FEATURES, NUM_CLASSES, HIDDEN_UNITS = 64, 10, (256, 128)
NUM_CLUSTERS, DESCRIPTOR_SIZE = 16, 32
LAYOUTS = (STACKED, HYPERNETWORK, CLUSTERS)


def build_models(layout: str, num_clients: int, seed: int = 0) -> PersonalModels:
    """Builds models of `num_clients` clients: a body of 49,536 shared values and heads of 1,290, in one of `LAYOUTS`.

    A client's own part is a head (`stacked`), one of 16 networks (`clusters`), or a descriptor of 32 values from which
    a hypernetwork makes the client's whole network (`hypernetwork`).
    """
    model = build_mlp((NUM_FEATURES,), NUM_CLASSES, HIDDEN_UNITS)
    random = np.random.default_rng(seed)
    client_ids = [client_id(number) for number in range(num_clients)]
    if layout == HYPERNETWORK:
        return _hypernetwork(model, client_ids, random)
    initial = model.init(seed)
    owned = model.head if layout == STACKED else tuple(initial)
    num_rows = 1 + (num_clients if layout == STACKED else NUM_CLUSTERS)
    rows = np.arange(num_clients) + 1 if layout == STACKED else 1 + np.arange(num_clients) % NUM_CLUSTERS
    return PersonalModels(
        model=model,
        client_ids=client_ids,
        rows=rows.astype(np.int32),
        shared={name: array for name, array in initial.items() if name not in owned},
        stacked={
            name: initial[name] + 0.1 * random.standard_normal((num_rows, *initial[name].shape), np.float32)
            for name in owned
        },
        layout=layout,
    )


def client_id(number: int) -> str:
    """Returns an id of the same length as a hashed id."""
    return f"{number:032x}"


def _hypernetwork(model: Model, client_ids: list[str], random: np.random.Generator) -> PersonalModels:
    hypernetwork = Hypernetwork(DESCRIPTOR_SIZE, (32,), seed=1)
    initial = {name: tf.constant(array) for name, array in model.init(0).items()}
    return PersonalModels(
        model=model,
        client_ids=client_ids,
        rows=np.arange(1, len(client_ids) + 1, dtype=np.int32),
        shared={name: tensor.numpy() for name, tensor in hypernetwork.init(initial).items()},
        stacked={"descriptor": random.standard_normal((len(client_ids) + 1, DESCRIPTOR_SIZE), np.float32)},
        make_weights=lambda parameters, own: hypernetwork.generate(parameters, own["descriptor"]),
        layout=HYPERNETWORK,
    )


CALLS, WARM_UP_CALLS = 1500, 100


def measure_latencies(servables: Mapping[str, tuple[Servable, int]], batch_size: int) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of a call by name, `p50_ms` and `p99_ms`; batches mix clients drawn at random.

    Args:
      servables: servable and its number of clients, by name.
      batch_size: number of examples in a call, each from its own client.
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
