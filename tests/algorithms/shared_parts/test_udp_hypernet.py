"""UDP-Alg on a hypernetwork small enough to differentiate it by finite differences, in NumPy and float64."""

import collections
import inspect
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA
from tests.algorithms.two_part_support import hparams
from tests.rounding import gamma
from tff_pdp.algorithms.shared_parts.udp_hypernet import build_hypernet, build_udp_hypernet
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.models.hypernetwork import Hypernetwork

SIZES = {"descriptor_size": 3, "hidden_units": (8,)}
SHAPES = {"kernel": (2, 2), "bias": (2,)}
RATES = {"learning_rate": 0.25, "descriptor_learning_rate": 0.5}


def build(**given):
    return build_udp_hypernet(**{**SIZES, **given})


def normal(shapes, seed):
    rng = np.random.default_rng(seed)
    return collections.OrderedDict((name, rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items())


def tensors(arrays):
    return collections.OrderedDict((name, tf.constant(array)) for name, array in arrays.items())


INITIAL = normal(SHAPES, 0)
# Parameters that make a difference everywhere: no zeros in the biases, and heads as large as the weights.
PHI = normal({name: value.shape for name, value in build().init_server(INITIAL)["parameters"].items()}, 1)
DESCRIPTOR = np.array([0.7, -1.2, 0.4], np.float32)
TARGET = normal(SHAPES, 2)
# Roundings of a weight that is made: sums over the descriptor and over the hidden units, with biases.
MADE = 3 + 1 + 8 + 1
# Roundings of what training and the way back add: three operations a step, a difference, and the sums back over the
# made weights and the hidden units.
PULLED = MADE + 2 * 3 + 1 + 6 + 8


def h(phi, descriptor):
    """The generated weights."""
    phi = {name: np.asarray(value, np.float64) for name, value in phi.items()}
    hidden = np.maximum(0, np.asarray(descriptor, np.float64) @ phi["hidden_0/kernel"] + phi["hidden_0/bias"])
    return {name: np.tensordot(hidden, phi[f"head/{name}/kernel"], 1) + phi[f"head/{name}/bias"] for name in SHAPES}


def magnitude(phi=PHI, descriptor=DESCRIPTOR):
    """Of the terms that the generated weights are sums of, the largest sum."""
    sums = h({name: np.abs(value) for name, value in phi.items()}, np.abs(descriptor))
    return max(np.abs(value).max() for value in sums.values())


def trained(theta, steps, target=TARGET, rate=0.25):
    """After steps on half the squared distance to the target."""
    for _ in range(steps):
        theta = {name: value - rate * (value - target[name]) for name, value in theta.items()}
    return theta


def pull_to(target):
    def grad_fn(current, data, index, scale, pull=None, trainable=None):
        assert trainable is None
        return {name: scale * (value - target[name]) for name, value in current.items()}

    return grad_fn


def update(algorithm, phi=PHI, descriptor=DESCRIPTOR, target=TARGET, steps=(2, 3), **given):
    message = {"parameters": tensors(phi)}
    state = {"descriptor": tf.convert_to_tensor(descriptor)}
    scalars = hparams(**{**RATES, **given}, local_steps=steps)
    return algorithm.client_update(message, state, NO_DATA, pull_to(target), scalars)


def differences(function, point, step=1e-6):
    """Central finite differences of a function by each value of an array."""
    point = np.asarray(point, np.float64)
    slopes = np.zeros_like(point)
    for place in np.ndindex(point.shape):
        moved = np.zeros_like(point)
        moved[place] = step
        slopes[place] = (function(point + moved) - function(point - moved)) / (2 * step)
    return slopes


def inner(weights, others):
    return sum(np.sum(weights[name] * others[name]) for name in SHAPES)


def movement(phi=PHI, descriptor=DESCRIPTOR, target=TARGET, steps=2):
    """How far a client's steps lead, `theta_K - theta_0`."""
    start = h(phi, descriptor)
    end = trained(start, steps, target)
    return {name: end[name] - start[name] for name in SHAPES}


def pull_rounding(descriptor=DESCRIPTOR):
    """Of the largest pull: a movement loses what the weights that it is a difference of do, the sums after it n u."""
    largest = max(np.abs(value).max() for value in movement(descriptor=descriptor).values())
    return gamma(PULLED) * max(1.0, magnitude(descriptor=descriptor) / largest)


def test_the_release_is_the_transposed_jacobian_by_phi_times_the_movement():
    released = update(build()).released["update"]
    moved = movement()
    assert {name: tuple(value.shape) for name, value in released.items()} == {
        name: value.shape for name, value in PHI.items()
    }
    for name in PHI:
        slopes = differences(lambda value, name=name: inner(h({**PHI, name: value}, DESCRIPTOR), moved), PHI[name])
        # By each value of phi a line, so that differences in float64 are no further off than 1e-8.
        np.testing.assert_allclose(released[name], slopes, atol=pull_rounding() * np.abs(slopes).max())
        assert np.any(slopes != 0)


@pytest.mark.parametrize("rate", [0.5, 0.125])
def test_the_descriptor_moves_by_its_rate_times_its_own_pull(rate):
    state = update(build(), descriptor_learning_rate=rate).state
    slopes = differences(lambda value: inner(h(PHI, value), movement()), DESCRIPTOR)
    assert np.all(slopes != 0)
    bound = gamma(1) + pull_rounding() * np.abs(slopes).max()
    np.testing.assert_allclose(state["descriptor"], DESCRIPTOR + rate * slopes, atol=bound)


def test_the_descriptor_is_not_released():
    algorithm = build()
    assert algorithm.released == {"update": "mean"}
    results = [update(algorithm, descriptor_learning_rate=rate) for rate in (0.5, 3.0)]
    assert list(results[0].released) == ["update"]
    assert list(results[0].state) == ["descriptor"]
    for one, other in zip(*(result.released["update"].values() for result in results), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.all(results[0].state["descriptor"] != results[1].state["descriptor"])


def test_by_default_all_layers_and_the_first_descriptor_have_something_to_learn():
    algorithm = build_udp_hypernet()
    server = algorithm.init_server(INITIAL)
    message = algorithm.broadcast(server)
    state = algorithm.init_client(message)
    result = algorithm.client_update(message, state, NO_DATA, pull_to(TARGET), hparams(**RATES, local_steps=1))
    assert list(result.released["update"]) == list(server["parameters"])
    for value in result.released["update"].values():
        assert np.any(value != 0)
    assert np.all(result.state["descriptor"] != state["descriptor"])


def test_without_a_learning_rate_nothing_moves():
    result = update(build(), learning_rate=0.0)
    for value in result.released["update"].values():
        np.testing.assert_array_equal(value, np.zeros(value.shape))
    np.testing.assert_array_equal(result.state["descriptor"], DESCRIPTOR)


def test_without_a_rate_of_its_own_the_descriptor_stays():
    result = update(build(), descriptor_learning_rate=0.0)
    np.testing.assert_array_equal(result.state["descriptor"], DESCRIPTOR)
    assert any(np.any(value) for value in result.released["update"].values())


def test_a_round_lowers_the_clients_losses_by_phi_alone_and_more_with_descriptors():
    algorithm = build(server_learning_rate=0.05)
    server = algorithm.init_server(INITIAL)
    server = {**server, "parameters": tensors(PHI)}
    descriptors = normal({"a": (3,), "b": (3,), "c": (3,)}, 5)
    targets = {client: normal(SHAPES, seed) for seed, client in enumerate(descriptors, 10)}

    def loss(phi, of):
        generated = {client: h(phi, descriptor) for client, descriptor in of.items()}
        return np.mean(
            [
                0.5 * sum(np.sum(np.square(weights[name] - targets[client][name])) for name in SHAPES)
                for client, weights in generated.items()
            ]
        )

    results = {
        client: update(algorithm, descriptor=descriptor, target=targets[client], descriptor_learning_rate=0.05)
        for client, descriptor in descriptors.items()
    }
    updates = [result.released["update"] for result in results.values()]
    mean = collections.OrderedDict((name, tf.reduce_mean([one[name] for one in updates], axis=0)) for name in PHI)
    after = algorithm.server_update(server, {"update": mean})["parameters"]
    moved = {client: result.state["descriptor"].numpy() for client, result in results.items()}
    before = loss(PHI, descriptors)
    assert loss(after, descriptors) < 0.9 * before
    assert loss(PHI, moved) < before
    # The other way it would get worse.
    away = {name: 2 * PHI[name] - after[name] for name in PHI}
    assert loss(away, descriptors) > before


def test_the_server_adds_the_mean_update():
    algorithm = build(server_optimizer="momentum", server_learning_rate=2.0, server_momentum=0.5)
    state = algorithm.init_server(INITIAL)
    first = {name: value.numpy() for name, value in state["parameters"].items()}
    ones = collections.OrderedDict((name, tf.ones(value.shape)) for name, value in first.items())
    for _ in range(2):
        state = algorithm.server_update(state, {"update": ones})
    for name, value in first.items():
        # Two sums, of values that are small beside 5.
        np.testing.assert_allclose(state["parameters"][name], value + 2 * 1 + 2 * 1.5, atol=gamma(2) * 10)


def test_a_personal_model_is_made_of_the_own_descriptor():
    model = build().personalise({"parameters": tensors(PHI)}, {"descriptor": tf.constant(DESCRIPTOR)})
    assert list(model) == list(SHAPES)
    for name, value in h(PHI, DESCRIPTOR).items():
        np.testing.assert_allclose(model[name], value, atol=gamma(MADE) * magnitude())


def test_the_shared_model_is_that_of_the_public_first_descriptor():
    algorithm = build()
    public = Hypernetwork(3, (8,), seed=1).init_descriptor()
    message = algorithm.broadcast({"parameters": tensors(PHI)})
    np.testing.assert_array_equal(algorithm.init_client(message)["descriptor"], public)
    model = algorithm.global_model({"parameters": tensors(PHI)})
    for name, value in h(PHI, public).items():
        np.testing.assert_allclose(model[name], value, atol=gamma(MADE) * magnitude(PHI, public))


def test_the_first_models_are_close_to_the_targets_own_initial_weights():
    distances, bounds = {}, {}
    for scale in (0.0, 0.1, 1.0):
        algorithm = build(head_scale=scale)
        parameters = algorithm.init_server(INITIAL)["parameters"]
        model = algorithm.global_model({"parameters": parameters})
        distances[scale] = {name: model[name] - INITIAL[name] for name in SHAPES}
        bounds[scale] = gamma(MADE + 2) * magnitude(parameters, algorithm.init_client({})["descriptor"])
    for name in SHAPES:
        np.testing.assert_array_equal(distances[0.0][name], np.zeros(SHAPES[name]))
        bound = bounds[1.0] + 10 * bounds[0.1]
        np.testing.assert_allclose(distances[1.0][name], 10 * distances[0.1][name], atol=bound)
        assert np.all(distances[0.1][name] != 0)


def test_the_seed_decides_the_first_parameters_and_descriptor():
    one, same, other = (build(hypernet_seed=seed) for seed in (4, 4, 5))
    states = [algorithm.init_server(INITIAL)["parameters"] for algorithm in (one, same, other)]
    descriptors = [algorithm.init_client({})["descriptor"] for algorithm in (one, same, other)]
    np.testing.assert_array_equal(states[0]["hidden_0/kernel"], states[1]["hidden_0/kernel"])
    np.testing.assert_array_equal(descriptors[0], descriptors[1])
    assert np.all(states[0]["hidden_0/kernel"] != states[2]["hidden_0/kernel"])
    assert np.all(descriptors[0] != descriptors[2])


def test_fine_tuning_goes_on_from_the_generated_model():
    algorithm = build(fine_tune=True)
    assert algorithm.hparams["adapt_steps"].default == 10
    message, state = {"parameters": tensors(PHI)}, {"descriptor": tf.constant(DESCRIPTOR)}
    given = hparams(**RATES, local_steps=1, adapt_steps=(3, 5))
    adapted = algorithm.adapt(message, state, NO_DATA, pull_to(TARGET), given)
    model = algorithm.personalise(message, adapted)
    for name, value in trained(h(PHI, DESCRIPTOR), 3).items():
        np.testing.assert_allclose(model[name], value, atol=gamma(MADE + 3 * 3) * magnitude())
    # Rounds are the same with it and without.
    np.testing.assert_equal(*(released(update(build(fine_tune=flag))) for flag in (True, False)))


def released(result):
    return {name: value.numpy() for name, value in result.released["update"].items()}


def test_without_fine_tuning_there_is_nothing_to_adapt():
    algorithm = build()
    assert algorithm.adapt is None
    assert "adapt_steps" not in algorithm.hparams


def test_descriptors_at_the_server_are_the_same_computation_under_a_condition():
    paper, own = build(paper_server_descriptors=True), build()
    assert "server keeps users' descriptors" in paper.claims.condition
    assert not own.claims.condition
    assert not own.claims.unsound
    np.testing.assert_equal(released(update(paper)), released(update(own)))


def test_without_privacy_it_is_the_same_computation():
    plain = build_hypernet(**SIZES)
    assert (plain.name, build().name) == ("hypernet", "udp_hypernet")
    np.testing.assert_equal(released(update(plain)), released(update(build())))
    for one, other in zip(
        plain.init_server(INITIAL)["parameters"].values(),
        build().init_server(INITIAL)["parameters"].values(),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    # The server adds the mean as it is.
    zeros = {"parameters": tensors(PHI), "optimizer": {}}
    after = plain.server_update(zeros, {"update": tensors(PHI)})["parameters"]
    for name, value in PHI.items():
        np.testing.assert_array_equal(after[name], 2 * value)


def test_defaults_are_those_of_one_another():
    given = inspect.signature(build_udp_hypernet).parameters
    for name, parameter in inspect.signature(build_hypernet).parameters.items():
        assert parameter.default == given[name].default


def test_a_stack_of_clients_is_each_of_them():
    algorithm = build()
    descriptors = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)

    def of_one(descriptor):
        result = update(algorithm, descriptor=descriptor)
        return result.released["update"], result.state["descriptor"]

    stacked, states = tf.vectorized_map(of_one, tf.constant(descriptors))
    for client, descriptor in enumerate(descriptors):
        alone, state = of_one(descriptor)
        # Both are rounded.
        bound = 2 * pull_rounding(descriptor)
        np.testing.assert_allclose(states[client], state, atol=bound * np.abs(state).max())
        for name, value in alone.items():
            np.testing.assert_allclose(stacked[name][client], value, atol=bound * np.abs(value).max())


@pytest.mark.parametrize("name", ["hypernet", "udp_hypernet"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"descriptor_size": 0}, "descriptor_size must be a whole number of at least 1, not 0"),
        ({"hidden_units": [4, 0]}, r"hidden_units\[1\] must be a whole number of at least 1, not 0"),
        ({"head_scale": -0.1}, r"head_scale must be a number of at least 0, not -0\.1"),
        ({"head_scale": math.nan}, "head_scale must be a number of at least 0, not nan"),
    ],
)
def test_values_that_mean_nothing(name, arguments, message):
    with pytest.raises(ConfigError, match=rf"{name}\.{message}"):
        build_algorithm(name, arguments, num_clients=2, rounds=1)


def test_an_unknown_server_optimizer_is_refused():
    with pytest.raises(ConfigError, match=r"udp_hypernet\.server_optimizer must be .*, not 'lamb'"):
        build_algorithm("udp_hypernet", {"server_optimizer": "lamb"}, num_clients=2, rounds=1)
