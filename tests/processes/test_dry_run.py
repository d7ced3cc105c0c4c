import math

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.models.dense import build_linear_regression, build_mlp
from tff_pdp.processes.client_work import Owned, dry_round, initial_weights, num_released, what_clients_own

# A body of 2 * 4 + 4 weights, a head of 4 * 3 + 3.
MODEL = build_mlp((2,), 3, (4,))
BODY, HEAD = 12, 15
NUM_CLIENTS = 5


def build(name, **given):
    return build_algorithm(name, given, num_clients=NUM_CLIENTS, rounds=4, head=MODEL.head)[0]


def dry_run(algorithm, model=MODEL):
    message = algorithm.broadcast(algorithm.init_server(initial_weights(model)))
    return message, dry_round(algorithm, message, model)


def leaves(value):
    return [np.asarray(leaf) for leaf in tf.nest.flatten(dict(value))]


def test_initial_weights_are_the_models_as_tensors():
    weights = initial_weights(MODEL)
    assert list(weights) == list(MODEL.init(0))
    for name, array in MODEL.init(0).items():
        assert isinstance(weights[name], tf.Tensor)
        np.testing.assert_array_equal(weights[name], array)


@pytest.mark.parametrize("name", sorted(ALGORITHMS.own))
def test_a_dry_round_keeps_and_releases_what_rounds_do(name):
    algorithm = build(name)
    message, result = dry_run(algorithm)
    before = algorithm.init_client(message)
    assert set(result.released) == set(algorithm.released)
    tf.nest.assert_same_structure(dict(before), dict(result.state))
    for one, other in zip(leaves(before), leaves(result.state), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.all(np.isfinite(other))
    assert num_released(algorithm, MODEL) == sum(leaf.size for leaf in leaves(result.released))


@pytest.mark.parametrize(
    "name",
    ["fed_avg", "dp_fed_avg_ft", "pmtl_ft", "pp_sgd", "fed_per", "fed_rep", "centaur", "dp_pfed_dsu", "udp_hypernet"],
)
def test_nothing_is_learnt(name):
    algorithm = build(name)
    message, result = dry_run(algorithm)
    for leaf in leaves(result.released):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
    for one, other in zip(leaves(algorithm.init_client(message)), leaves(result.state), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("local_only", {}, 0),
        ("fed_avg", {}, BODY + HEAD),
        ("dp_fed_avg_ft", {}, BODY + HEAD),
        ("pmtl_ft", {}, BODY + HEAD),
        ("pp_sgd", {}, BODY + HEAD),
        ("fed_per", {}, BODY),
        ("fed_rep", {}, BODY),
        ("centaur", {}, BODY),
        # All values are released, of which noise changes anything by fewer.
        ("dp_pfed_dsu", {"sparsity": 0.25}, BODY),
        ("dp_pfed_dsu", {"sparsity": 0.25, "mask_source": "client"}, BODY),
        # Two hidden layers over a descriptor of three values, and heads for all weights.
        (
            "udp_hypernet",
            {"descriptor_size": 3, "hidden_units": [15, 14]},
            (3 + 1) * 15 + (15 + 1) * 14 + (14 + 1) * (BODY + HEAD),
        ),
        ("mocha", {}, BODY + HEAD),
    ],
)
def test_how_much_a_client_releases(name, given, expected):
    assert num_released(build(name, **given), MODEL) == expected


def test_of_a_masked_body_noise_changes_the_masks_ones():
    algorithm = build("dp_pfed_dsu", sparsity=0.25)
    # Of the kernel's eight weights two; the bias is not masked.
    assert algorithm.claims.noised_size(initial_weights(MODEL)) == 2 + 4


def test_regressions_have_labels_of_another_type():
    model = build_linear_regression((3,))
    algorithm = build("fed_avg")
    _, result = dry_run(algorithm, model)
    assert num_released(algorithm, model) == 4
    assert all(math.isfinite(float(tf.reduce_sum(value))) for value in result.released["update"].values())


ALL = tuple(MODEL.init(0))


@pytest.mark.parametrize(
    ("name", "given", "owned"),
    [
        ("fed_avg", {}, Owned((), ())),
        ("local_only", {}, Owned(tuple(f"weights/{name}" for name in ALL), ALL)),
        ("centaur", {}, Owned(tuple(f"head/{name}" for name in MODEL.head), MODEL.head)),
        ("dp_fed_avg_ft", {}, Owned(tuple(f"head/{name}" for name in MODEL.head), MODEL.head)),
        ("ifca", {}, Owned(("cluster", *(f"weights/{name}" for name in ALL)), ALL)),
        ("udp_hypernet", {"hidden_units": [8]}, Owned(("descriptor",), ALL)),
        # In its last round.
        ("finetune", {"federated_fraction": 1.0}, Owned(tuple(f"weights/{name}" for name in ALL), ())),
        ("finetune", {}, Owned(tuple(f"weights/{name}" for name in ALL), ALL)),
    ],
)
def test_what_clients_own_is_what_differs_between_two(name, given, owned):
    found = what_clients_own(build(name, **given), MODEL, rounds=4)
    assert tuple(map(sorted, found)) == tuple(map(sorted, owned))
