"""What is exported: one network with a head for every client, in every layout, with weights drawn at random."""

import numpy as np
import tensorflow as tf

from serving.models import CLUSTERS, HYPERNETWORK, STACKED, PersonalModels
from tff_pdp.models.base import Model
from tff_pdp.models.hypernetwork import Hypernetwork
from tff_pdp.models.mlp import build_mlp

NUM_FEATURES, NUM_CLASSES, HIDDEN_UNITS = 64, 10, (256, 128)
NUM_CLUSTERS, DESCRIPTOR_SIZE = 16, 32
LAYOUTS = (STACKED, HYPERNETWORK, CLUSTERS)


def build_models(layout: str, num_clients: int, seed: int = 0) -> PersonalModels:
    """Models of so many clients: a body of 49,536 shared values and heads of 1,290, in one of `LAYOUTS`.

    A client's own part is its head (`stacked`), one of 16 networks (`clusters`), or a descriptor of 32 values that a
    hypernetwork makes its whole network from (`hypernetwork`).
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
    """An id as long as a hashed one."""
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
