import collections
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import assert_within, gamma, standard_errors
from tff_pdp.models.convolutional import build_lenet
from tff_pdp.models.hypernetwork import Hypernetwork

# Names that end as those of heads do, and every rank from scalars up.
SHAPES = {"conv/kernel": (3, 2, 1, 2), "conv/bias": (2,), "dense/kernel": (3, 4), "temperature": ()}
HYPERNETWORK = Hypernetwork(descriptor_size=5, hidden_units=(7, 6), seed=3)


def normal_like(shapes, seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return collections.OrderedDict((name, tf.constant(rng.normal(size=shape), dtype)) for name, shape in shapes.items())


def normal_parameters(dtype=np.float32, seed=1):
    initial = HYPERNETWORK.init(normal_like(SHAPES, 0))
    return normal_like({name: value.shape for name, value in initial.items()}, seed, dtype)


def normal_descriptor(dtype=np.float32, seed=2):
    return tf.constant(np.random.default_rng(seed).normal(size=5), dtype)


def roundings(dtype):
    """Of what is generated, relative to sums of magnitudes: a sum in each of three layers, with its bias."""
    return gamma((5 + 1) + (7 + 1) + (6 + 1), dtype)


def pull_roundings(dtype):
    """Likewise of what is pulled back: there and back, and a sum over all the weights of the target."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    return gamma(2 * (5 + 7 + 6 + 3) + sum(sizes), dtype)


def magnitudes(parameters, descriptor, cotangent):
    """What is generated and what is pulled back where nothing cancels, in float64."""
    parts = tf.nest.map_structure(lambda x: tf.abs(tf.cast(x, tf.float64)), [parameters, descriptor, cotangent])
    return HYPERNETWORK.generate(*parts[:2]), HYPERNETWORK.pull_back(*parts)


def reference(parameters, descriptor):
    """The same in NumPy and float64, by sums over the features."""
    p = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    hidden = np.maximum(0, np.asarray(descriptor, np.float64) @ p["hidden_0/kernel"] + p["hidden_0/bias"])
    hidden = np.maximum(0, hidden @ p["hidden_1/kernel"] + p["hidden_1/bias"])
    return {
        name: sum(h * k for h, k in zip(hidden, p[f"head/{name}/kernel"], strict=True)) + p[f"head/{name}/bias"]
        for name in SHAPES
    }


def test_parameters_have_the_targets_names_and_shapes():
    parameters = HYPERNETWORK.init(normal_like(SHAPES, 0))
    assert [(name, tuple(value.shape)) for name, value in parameters.items()] == [
        ("hidden_0/kernel", (5, 7)),
        ("hidden_0/bias", (7,)),
        ("hidden_1/kernel", (7, 6)),
        ("hidden_1/bias", (6,)),
        ("head/conv/kernel/kernel", (6, 3, 2, 1, 2)),
        ("head/conv/kernel/bias", (3, 2, 1, 2)),
        ("head/conv/bias/kernel", (6, 2)),
        ("head/conv/bias/bias", (2,)),
        ("head/dense/kernel/kernel", (6, 3, 4)),
        ("head/dense/kernel/bias", (3, 4)),
        ("head/temperature/kernel", (6,)),
        ("head/temperature/bias", ()),
    ]
    assert {value.dtype for value in parameters.values()} == {tf.float32}
    generated = HYPERNETWORK.generate(parameters, HYPERNETWORK.init_descriptor())
    assert [(name, tuple(value.shape)) for name, value in generated.items()] == list(SHAPES.items())


def test_number_of_parameters_for_lenet():
    hypernetwork = Hypernetwork(descriptor_size=8, hidden_units=(10,), seed=0)
    model = build_lenet((16, 16, 1), 10)
    # 16 -> 12 -> 6 -> 2 -> 1.
    target_size = 26 * 16 + 401 * 32 + 33 * 120 + 121 * 84 + 85 * 10
    assert model.num_parameters() == target_size
    parameters = hypernetwork.init(model.init(0))
    assert sum(math.prod(value.shape) for value in parameters.values()) == (8 + 1) * 10 + (10 + 1) * target_size
    weights = hypernetwork.generate(parameters, hypernetwork.init_descriptor())
    assert model.predict(weights, tf.ones([2, 16, 16, 1])).shape == (2, 10)


def test_by_hand():
    hypernetwork = Hypernetwork(descriptor_size=2, hidden_units=(2,), seed=0)
    parameters = {
        "hidden_0/kernel": tf.constant([[1.0, -1.0], [2.0, 1.0]]),
        "hidden_0/bias": tf.constant([0.5, -3.0]),
        "head/a/kernel": tf.constant([[[2.0, -1.0]], [[5.0, 5.0]]]),
        "head/a/bias": tf.constant([[10.0, 20.0]]),
    }
    # The hidden units are 3 + 2 + 0.5 and, below zero, nothing.
    generated = hypernetwork.generate(parameters, tf.constant([3.0, 1.0]))
    np.testing.assert_array_equal(generated["a"], [[21.0, 14.5]])
    by_parameters, by_descriptor = hypernetwork.pull_back(
        parameters, tf.constant([3.0, 1.0]), {"a": tf.constant([[1.0, 4.0]])}
    )
    # The first hidden unit has 2 * 1 - 1 * 4 = -2.
    expected = {
        "hidden_0/kernel": [[-6.0, 0.0], [-2.0, 0.0]],
        "hidden_0/bias": [-2.0, 0.0],
        "head/a/kernel": [[[5.5, 22.0]], [[0.0, 0.0]]],
        "head/a/bias": [[1.0, 4.0]],
    }
    assert list(by_parameters) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(by_parameters[name], value)
    np.testing.assert_array_equal(by_descriptor, [-2.0, -4.0])


def test_without_hidden_layers_it_is_linear():
    hypernetwork = Hypernetwork(descriptor_size=2, hidden_units=(), seed=0)
    parameters = hypernetwork.init({"a": np.zeros([3], np.float32)})
    assert list(parameters) == ["head/a/kernel", "head/a/bias"]
    generated = hypernetwork.generate(parameters, tf.constant([-1.0, 2.0]))
    kernel = parameters["head/a/kernel"]
    bound = gamma(3) * (2 * np.abs(kernel[1]) + np.abs(kernel[0]))
    assert_within(generated["a"], 2 * kernel[1] - kernel[0], bound)


@pytest.mark.parametrize("wrap", [lambda function: function, tf.function])
def test_generates_what_numpy_does(wrap):
    parameters, descriptor = normal_parameters(), normal_descriptor()
    generated = wrap(HYPERNETWORK.generate)(parameters, descriptor)
    expected = reference(parameters, descriptor)
    assert list(generated) == list(SHAPES)
    terms, _ = magnitudes(parameters, descriptor, normal_like(SHAPES, 4))
    for name, value in generated.items():
        assert_within(value, expected[name], roundings(np.float32) * terms[name])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_pulls_back_as_differences_of_numpy_do(dtype):
    parameters, descriptor = normal_parameters(dtype), normal_descriptor(dtype)
    cotangent = normal_like(SHAPES, 4, dtype)
    by_parameters, by_descriptor = HYPERNETWORK.pull_back(parameters, descriptor, cotangent)
    assert list(by_parameters) == list(parameters)

    step = 1e-5
    terms, (by_terms, by_term) = magnitudes(parameters, descriptor, cotangent)
    # By each value the sum is a line, of which a difference loses what both ends round.
    of_difference = pull_roundings(np.float64) * sum(np.vdot(np.abs(cotangent[n]), terms[n]) for n in SHAPES) / step

    def difference(name, position):
        def along(sign):
            moved = {key: np.array(value, np.float64) for key, value in parameters.items()}
            moved["descriptor"] = np.array(descriptor, np.float64)
            moved[name][position] += sign * step
            generated = reference(moved, moved["descriptor"])
            return sum(np.vdot(cotangent[key], value) for key, value in generated.items())

        return (along(1) - along(-1)) / (2 * step)

    for name, value in {**by_parameters, "descriptor": by_descriptor}.items():
        expected = np.array([difference(name, position) for position in np.ndindex(*value.shape)])
        bound = pull_roundings(dtype) * np.ravel({**by_terms, "descriptor": by_term}[name]) + of_difference
        assert_within(np.ravel(value), expected, bound)


def test_the_first_model_is_close_to_the_targets_own():
    target = {
        "kernel": tf.constant(np.random.default_rng(0).normal(size=(5, 5, 16, 100)), tf.float32),
        "bias": tf.zeros([4000]),
    }
    hypernetwork = Hypernetwork(descriptor_size=100, hidden_units=(200, 100), seed=0, head_scale=0.05)
    parameters = hypernetwork.init(target)
    for name, value in target.items():
        np.testing.assert_array_equal(parameters[f"head/{name}/bias"], value)
    generated = hypernetwork.generate(parameters, hypernetwork.init_descriptor())
    # A sum over the fan-in then moves by the scale. With 100 features this is right to some 15 %.
    for name, fan_in in (("kernel", 400), ("bias", 1)):
        moved = np.std(generated[name] - target[name]) * math.sqrt(fan_in)
        assert 0.7 * 0.05 < moved < 1.3 * 0.05
    still = Hypernetwork(descriptor_size=3, hidden_units=(4,), seed=0, head_scale=0.0)
    generated = still.generate(still.init(target), still.init_descriptor())
    for name, value in target.items():
        np.testing.assert_array_equal(generated[name], value)


def test_initial_values_follow_the_seed():
    target = normal_like(SHAPES, 0)
    first, again = HYPERNETWORK.init(target), tf.function(HYPERNETWORK.init)(target)
    other = Hypernetwork(descriptor_size=5, hidden_units=(7, 6), seed=2**40)
    assert list(again) == list(first)
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        if name.endswith("kernel"):
            assert not np.array_equal(value, other.init(target)[name])
    np.testing.assert_array_equal(HYPERNETWORK.init_descriptor(), HYPERNETWORK.init_descriptor())
    assert not np.array_equal(HYPERNETWORK.init_descriptor(), other.init_descriptor())
    # Each tensor has values of its own, and so has the descriptor.
    first_values = [np.ravel(value)[0] for name, value in first.items() if name.endswith("/kernel")]
    ratios = np.divide.outer(first_values, first_values)[np.triu_indices(len(first_values), 1)]
    assert len(np.unique(ratios)) == len(ratios)


def test_initial_values_have_the_variance_that_the_layer_asks_for():
    hypernetwork = Hypernetwork(descriptor_size=400, hidden_units=(300,), seed=0)
    kernel = hypernetwork.init({"a": tf.zeros([1])})["hidden_0/kernel"]
    stddev = math.sqrt(2 / 400)
    np.testing.assert_allclose(np.std(kernel), stddev, rtol=standard_errors() / math.sqrt(2 * np.size(kernel)))
    assert np.abs(np.mean(kernel)) < standard_errors() * stddev / math.sqrt(np.size(kernel))
    descriptor = Hypernetwork(descriptor_size=10_000, hidden_units=(), seed=0).init_descriptor()
    assert descriptor.dtype == tf.float32
    bounds = standard_errors(2) / np.sqrt([10_000, 2 * 10_000])
    assert_within([np.mean(descriptor), np.std(descriptor)], [0.0, 1.0], bounds)


@pytest.mark.parametrize("shared", [True, False])
def test_a_vectorised_map_over_clients_is_a_loop(shared):
    many = [normal_parameters(seed=seed) for seed in range(3)]
    descriptors = tf.stack([normal_descriptor(seed=seed) for seed in range(3)])
    cotangents = [normal_like(SHAPES, seed) for seed in range(3)]
    stacked = tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *many)
    own = (descriptors, tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *cotangents))

    def both(parameters, descriptor, cotangent):
        return (
            HYPERNETWORK.generate(parameters, descriptor),
            HYPERNETWORK.pull_back(parameters, descriptor, cotangent),
        )

    @tf.function
    def mapped():
        if shared:
            return tf.vectorized_map(lambda client: both(many[0], *client), own, fallback_to_while_loop=False)
        return tf.vectorized_map(lambda client: both(*client), (stacked, *own), fallback_to_while_loop=False)

    result = mapped()
    for index in range(3):
        expected = both(many[0 if shared else index], descriptors[index], cotangents[index])
        terms = magnitudes(many[0 if shared else index], descriptors[index], cotangents[index])
        tf.nest.map_structure(
            lambda own, one, term, index=index: assert_within(own[index], one, 2 * pull_roundings(np.float32) * term),
            result,
            expected,
            terms,
        )
