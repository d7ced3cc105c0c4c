"""What the contract tests share besides `tff_pdp.testing.algorithms`: registered methods, comparisons."""

import functools

import numpy as np

from tests.rounding import probable_gamma
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.phases import in_phases
from tff_pdp.algorithms.whole_models.fed_avg import build_fed_avg
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.models.dense import build_mlp
from tff_pdp.testing.algorithms import MODEL, ROUNDS, SIZES, compose_with_dp_sgd, leaves

# Noise of this one is drawn step by step.
LARGE = build_mlp((2, 2, 1), 3, (700,))
# Where the default is large for so small a model.
SMALLER = {"hypernet": {"hidden_units": (8,)}, "udp_hypernet": {"hidden_units": (8,)}}
# Settings that make a method of their own: other values leave a client, and the server keeps another state.
VARIANTS = {
    "pfa_plus": {"kind": "pfa", "plus": True, "partition": "known", "liberal_share": 0.5},
    "fed_meta_reptile": {"kind": "fed_meta", "order": "reptile"},
    "on_synthetic_data": {"kind": "tests.contract.contract_support:build_federated_phase"},
    "adapted_to_records": {"kind": "tests.contract.contract_support:build_adaptation_phase"},
}


def build_federated_phase() -> Algorithm:
    """Builds rounds on synthetic data by FedAvg."""
    return in_phases(build_fed_avg(), federated_rounds=ROUNDS, num_clients=len(SIZES)).federated


def build_adaptation_phase() -> Algorithm:
    """Builds rounds on records after rounds on synthetic data by FedAvg."""
    return in_phases(build_fed_avg(), federated_rounds=ROUNDS, num_clients=len(SIZES)).adaptation


@functools.cache
def build(name, model=MODEL, **arguments):
    """A registered algorithm or variant for these clients and rounds, and its process; built once for all tests."""
    arguments = {**SMALLER.get(name, {}), **VARIANTS.get(name, {}), **arguments}
    algorithm, _ = build_algorithm(name, arguments, num_clients=len(SIZES), rounds=ROUNDS, head=MODEL.head)
    return algorithm, compose_with_dp_sgd(algorithm, model)


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
