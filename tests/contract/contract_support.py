"""What the contract tests share: a small model, clients of different sizes, rounds of training, comparisons."""

import collections
import functools

import numpy as np
import tensorflow as tf

from tests.rounding import probable_gamma
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.privacy.mechanisms.selection import build_selector
from tff_pdp.processes.compose import client_params_columns, compose

MODEL = build_mlp((2, 2, 1), 3, (4,))
# Noise of this one is drawn step by step.
LARGE = build_mlp((2, 2, 1), 3, (700,))
# Examples of each client, and rows of its data: two stacks of two clients, with padding and without.
SIZES = (6, 9, 4, 3)
ROWS = (9, 9, 4, 4)
ROUNDS = 3
# Where the default is large for so small a model.
SMALLER = {"hypernet": {"hidden_units": (8,)}, "udp_hypernet": {"hidden_units": (8,)}}


def client_data(seed=0, rows=ROWS, padding=0.0, padding_label=0):
    rng = np.random.default_rng(seed)
    data = []
    for size, padded in zip(SIZES, rows, strict=True):
        x = np.full([padded, 2, 2, 1], padding, np.float32)
        y = np.full(padded, padding_label, np.int64)
        x[:size] = rng.normal(size=(size, 2, 2, 1))
        y[:size] = rng.integers(0, 3, size, dtype=np.int64)
        data.append(collections.OrderedDict(x=x, y=y, num_examples=np.int32(size)))
    return data


@functools.cache
def build(name, model=MODEL, **arguments):
    """A registered algorithm for these clients and rounds, and its process; built once for all tests."""
    arguments = {**SMALLER.get(name, {}), **arguments}
    algorithm, _ = build_algorithm(name, arguments, num_clients=len(SIZES), rounds=ROUNDS, head=MODEL.head)
    return algorithm, compose_with_dp_sgd(algorithm, model)


def compose_with_dp_sgd(algorithm, model):
    selector = build_selector(model, loss_bound=1.0) if algorithm.candidates else None
    return compose(algorithm, model, estimator=build_dp_sgd(model), selector=selector)


def client_params(
    algorithm, round_number, noise_multiplier=1.0, clip_norm=1.0, sampling_rate=0.5, selection_epsilon=0.5, **hparams
):
    """What each client is told; a value is for all clients, or a tuple with one for each."""
    key = RunKey.from_test_seed(5)
    estimator = build_dp_sgd(MODEL)
    columns = client_params_columns(
        algorithm,
        estimator,
        mechanism={
            "clip_norm": clip_norm,
            "noise_multiplier": noise_multiplier,
            "sampling_rate": sampling_rate,
            "expected_batch_size": np.broadcast_to(sampling_rate, len(SIZES)) * SIZES,
        },
        hparams={**dict.fromkeys(algorithm.step_hparams, 2), "client_index": np.arange(len(SIZES)), **hparams},
        seeds=np.stack([key.client_seed(round_number, f"client {index}") for index in range(len(SIZES))]),
        selection_epsilons=selection_epsilon if round_number <= algorithm.selection_rounds else 0.0,
    )
    return [tf.nest.map_structure(lambda column, i=index: column[i], columns) for index in range(len(SIZES))]


def ready(process, algorithm, server, clients, data=None, **params):
    """The clients' states as their models are used."""
    if process.adapt is None:
        return clients
    data = client_data() if data is None else data
    return process.adapt(server, clients, data, client_params(algorithm, 99, adapt_steps=2, **params))


def run(process, algorithm, rounds=ROUNDS, start=None, data=None, **params):
    server, clients = start or (process.initialize(), None)
    first = 1
    if clients is None:
        clients = [process.init_client(server)] * len(SIZES)
    else:
        first, rounds = rounds
    data = client_data() if data is None else data
    for number in range(first, rounds + 1):
        server, clients, _ = process.next(server, clients, data, client_params(algorithm, number, **params))
    return server, clients


def leaves(value):
    return [np.asarray(leaf) for leaf in tf.nest.flatten(value)]


def assert_same(first, second):
    for one, other in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def roundings(model=MODEL, steps=2, rounds=ROUNDS, passes=2):
    """Counts the roundings in a row between the first weights and those after some rounds.

    In a step these are the inner products forwards and backwards through two layers, the norm of an example's gradient
    and, for hypernetworks, sums over all weights in both directions: none is longer than there are weights, and there
    are six. Then come a sum over a batch, and some 64 for the losses, their gradient, the clip, the noise (a
    logarithm, a root and a cosine, of a few units each) and the update. A round ends with sums over clients.
    """
    a_step = 6 * model.num_parameters() + max(SIZES) + 64
    return rounds * (steps * passes * a_step + 2 * len(SIZES))


def assert_close(first, second, operations=None):
    """Fails where two computations of the same numbers differ by more than their roundings explain.

    Each of both may be off by the bound of its roundings, relative to the largest number of all: whatever is wrong with
    one weight spreads to all others by the losses. With learning rates as small as in these tests steps do not make
    errors grow: a gradient changes by no more than the weights do.
    """
    first, second = leaves(first), leaves(second)
    floats = [np.abs(leaf).max() for leaf in second if leaf.dtype.kind == "f" and leaf.size]
    bound = 2 * probable_gamma(operations or roundings()) * max(floats, default=0.0)
    for one, other in zip(first, second, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(one, other, rtol=0, atol=bound if one.dtype.kind == "f" else 0)
