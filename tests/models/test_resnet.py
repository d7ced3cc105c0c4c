import math

import numpy as np
import pytest
import tensorflow as tf

from tests.models.float64_support import in_float64, keras_in_float64, per_example_norms, rounding
from tests.models.settings_support import build_from_settings
from tests.rounding import assert_within, gamma, network_roundings, probable_gamma, standard_errors
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import MODELS
from tff_pdp.models.resnet import build_resnet20
from tff_pdp.privacy.mechanisms import per_example
from tff_pdp.privacy.mechanisms.per_example import clipped_sum

# Odd and even sizes, and a shortcut of each kind.
SMALL = build_resnet20((6, 5, 1), 3, 1, (2, 4), group_norm_groups=2)


def normal_weights(model, seed=0):
    """Unlike initial ones, none is zero or one."""
    rng = np.random.default_rng(seed)
    return {name: tf.constant(rng.normal(size=array.shape), tf.float32) for name, array in model.init(0).items()}


def draw_examples(model, num_examples, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, *model.input_shape))
    return tf.constant(x, tf.float32), tf.constant(rng.integers(0, model.num_classes, num_examples))


def test_the_defaults_are_resnet_20_with_270_thousand_weights():
    model = MODELS.find("resnet20")((32, 32, 3), 10)
    convolutions = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    channels = 7 * 16 + 6 * 32 + 6 * 64
    dense = 64 * 10 + 10
    # As with batch norm (269 722 trainable weights), and a bias for every channel.
    assert convolutions + 2 * channels + dense == 269_722
    assert model.num_parameters() == 269_722 + channels == 270_410
    assert (model.name, model.head) == ("resnet20", ("dense/kernel", "dense/bias"))
    initial = model.init(0)
    # 20 layers of weights.
    assert sum(name.endswith("/kernel") for name in initial) == 20
    assert initial["stage_2/block_2/conv_1/kernel"].shape == (3, 3, 64, 64)
    assert MODELS.find("resnet20")((28, 28, 1), 62, blocks_per_stage=5).num_parameters() > 400_000


def test_weights_are_in_the_order_from_input_to_output():
    assert [
        (name, array.shape)
        for name, array in build_resnet20((4, 4, 3), 5, 1, (2, 4), group_norm_groups=2).init(0).items()
    ] == [
        ("conv/kernel", (3, 3, 3, 2)),
        ("conv/bias", (2,)),
        ("norm/scale", (2,)),
        ("norm/bias", (2,)),
        ("stage_0/block_0/conv_0/kernel", (3, 3, 2, 2)),
        ("stage_0/block_0/conv_0/bias", (2,)),
        ("stage_0/block_0/norm_0/scale", (2,)),
        ("stage_0/block_0/norm_0/bias", (2,)),
        ("stage_0/block_0/conv_1/kernel", (3, 3, 2, 2)),
        ("stage_0/block_0/conv_1/bias", (2,)),
        ("stage_0/block_0/norm_1/scale", (2,)),
        ("stage_0/block_0/norm_1/bias", (2,)),
        ("stage_1/block_0/conv_0/kernel", (3, 3, 2, 4)),
        ("stage_1/block_0/conv_0/bias", (4,)),
        ("stage_1/block_0/norm_0/scale", (4,)),
        ("stage_1/block_0/norm_0/bias", (4,)),
        ("stage_1/block_0/conv_1/kernel", (3, 3, 4, 4)),
        ("stage_1/block_0/conv_1/bias", (4,)),
        ("stage_1/block_0/norm_1/scale", (4,)),
        ("stage_1/block_0/norm_1/bias", (4,)),
        ("dense/kernel", (4, 5)),
        ("dense/bias", (5,)),
    ]


def reference_network(input_shape, num_classes, blocks_per_stage, channels, groups):
    """The same by Keras, with a border of one pixel around every convolution's input."""

    def convolve(x, size, strides=1):
        x = tf.keras.layers.Conv2D(size, 3, strides)(tf.keras.layers.ZeroPadding2D(1)(x))
        return tf.keras.layers.GroupNormalization(groups, epsilon=1e-5)(x)

    inputs = x = tf.keras.Input(input_shape)
    x = tf.nn.relu(convolve(x, channels[0]))
    for stage, size in enumerate(channels):
        for index in range(blocks_per_stage):
            strides = 2 if stage and not index else 1
            shortcut = tf.keras.layers.AveragePooling2D(1, strides)(x)
            missing = tf.zeros_like(shortcut[..., :1])
            shortcut = tf.concat([shortcut, *[missing] * (size - x.shape[-1])], axis=-1)
            x = tf.nn.relu(convolve(tf.nn.relu(convolve(x, size, strides)), size) + shortcut)
    x = tf.keras.layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(num_classes)(x))


@pytest.mark.parametrize("input_shape", [(8, 8, 3), (7, 6, 1)])
def test_forward_and_backward_pass_are_those_of_keras(input_shape):
    model = build_resnet20(input_shape, 3, 2, (4, 8, 8), group_norm_groups=2)
    with keras_in_float64():
        reference = reference_network(input_shape, 3, 2, (4, 8, 8), 2)
    weights = in_float64(normal_weights(model))
    reference.set_weights(list(weights.values()))
    x = tf.cast(draw_examples(model, 3)[0], tf.float64)
    sizes = {"examples": 3, "positions": input_shape[0] * input_shape[1]}
    with tf.GradientTape() as own_tape, tf.GradientTape() as tape:
        own_tape.watch(weights)
        own, other = model.predict(weights, x), reference(x)
    np.testing.assert_allclose(own, other, atol=rounding(weights, other, **sizes))
    expected = tape.gradient(other, reference.trainable_variables)
    # A bias that a normalisation takes away again has a gradient of zero, as the rest of sums of others' size.
    largest = max(np.abs(theirs).max() for theirs in expected)
    for mine, theirs in zip(own_tape.gradient(own, weights).values(), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=rounding(weights, largest, **sizes))


def test_the_shortcut_by_hand():
    """With scales of zero nothing passes the convolutions of a block."""
    model = build_resnet20((3, 4, 1), 2, 1, (1, 2), group_norm_groups=1)
    weights = {**model.init(0)}
    for name in weights:
        if name.startswith("stage") and name.endswith("scale"):
            weights[name] = np.zeros_like(weights[name])
    weights["conv/kernel"] = np.zeros([3, 3, 1, 1], np.float32)
    weights["conv/kernel"][1, 1] = 1.0
    weights["dense/kernel"] = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    x = np.array([[0.0, 9, 2, 9], [9, 9, 9, 9], [4, 9, 6, 9]], np.float32)
    # Every second pixel holds 0, 2, 4 and 6. Raised by the norm's bias, all are positive.
    weights["norm/bias"] = np.array([10.0], np.float32)
    expected = 10 + (np.mean([0, 2, 4, 6]) - x.mean()) / np.sqrt(x.var() + 1e-5)
    # Two means over twelve positions, of what is at most twice as large as the result, and one over four.
    found = model.predict(weights, tf.reshape(x, [1, 3, 4, 1]))
    np.testing.assert_allclose(found, [[expected, 0.0]], rtol=2 * gamma(2 * (12 + 2) + 4 + 8))


def test_initial_weights_follow_the_seed_and_are_he_normal():
    model = build_resnet20((8, 8, 3), 4)
    first, again, other = model.init(0), model.init(0), model.init(1)
    for name, array in first.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, again[name])
        if name.endswith(("scale", "bias")):
            assert set(array.tolist()) == {float(name.endswith("scale"))}
    kernel = first["stage_2/block_1/conv_0/kernel"]
    assert not np.array_equal(kernel, other["stage_2/block_1/conv_0/kernel"])
    # Of 36 864 values.
    stddev = math.sqrt(2 / (9 * 64))
    bounds = standard_errors(2) * stddev / np.sqrt([kernel.size, 2 * kernel.size])
    assert_within([kernel.mean(), kernel.std()], [0.0, stddev], bounds)


@pytest.mark.parametrize("input_shape", [(4, 4, 1), (5, 4, 2), (28, 28, 1)])
def test_sizes_of_input(input_shape):
    model = build_resnet20(input_shape, 3, 1)
    weights, x = in_float64(model.init(0)), tf.cast(draw_examples(model, 2)[0], tf.float64)
    together = model.predict(weights, x)
    assert together.shape == (2, 3)
    apart = [model.predict(weights, x[index : index + 1])[0] for index in range(2)]
    bound = rounding(weights, together, positions=input_shape[0] * input_shape[1])
    np.testing.assert_allclose(together, apart, atol=bound)


def test_without_classes_and_with_shift_and_scale():
    plain = build_resnet20((4, 4, 1), 0, 1)
    shifted = build_resnet20((4, 4, 1), 0, 1, input_shift=-1.0, input_scale=2.0)
    weights, x = in_float64(plain.init(0)), tf.random.stateless_uniform([2, 4, 4, 1], [1, 2], dtype=tf.float64)
    values = plain.predict(weights, x)
    # A sum that is no larger than 6 and the difference of 3 are rounded, twice in a square, which is once more.
    assert np.abs(values).max() <= 3
    bound = gamma(2 * (2 + 1) + 1, np.float64)
    np.testing.assert_allclose(plain.loss(weights, x, values + 3.0), [4.5, 4.5], rtol=bound)
    expected = plain.predict(weights, (x - 1.0) * 2.0)
    bound = rounding(weights, expected, positions=4 * 4)
    np.testing.assert_allclose(shifted.predict(weights, x), expected, atol=bound)


def flat(weights):
    return np.concatenate([np.ravel(value) for value in weights.values()])


def example_gradients(model, weights, x, y):
    rows = []
    for index in range(len(y)):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = model.loss(weights, x[index : index + 1], y[index : index + 1])
        rows.append(flat(tape.gradient(loss, weights)))
    return np.stack(rows)


@pytest.mark.all
def test_each_examples_gradient_is_clipped_by_closed_forms(caplog, monkeypatch):
    monkeypatch.setattr(per_example, "_models_logged", set())
    weights = normal_weights(SMALL)
    x, y = draw_examples(SMALL, 5)
    rows = example_gradients(SMALL, in_float64(weights), tf.cast(x, tf.float64), y)
    norms = np.linalg.norm(rows, axis=1)
    clip_norm, included = np.median(norms).item(), np.array([1.0, 1.0, 0.0, 1.0, 1.0])
    expected = (rows * (included * np.minimum(1, clip_norm / norms))[:, np.newaxis]).sum(axis=0)

    @tf.function(
        input_signature=[tf.TensorSpec([None, 6, 5, 1]), tf.TensorSpec([None], tf.int64), tf.TensorSpec([None])]
    )
    def clip(x, y, included):
        total = clipped_sum(SMALL, weights, x, y, clip_norm=tf.constant(clip_norm, tf.float32), included=included)
        return total, per_example_norms(SMALL, weights, x, y)

    total, own_norms = clip(x, y, tf.constant(included, tf.float32))
    assert list(total) == list(weights)
    # The norms also sum the squares of a gradient.
    bound = probable_gamma(network_roundings(weights, 5, 6 * 5) + rows.shape[1])
    np.testing.assert_allclose(own_norms, norms, rtol=bound)
    np.testing.assert_allclose(flat(total), expected, atol=2 * bound * np.abs(expected).max())
    nothing, _ = clip(x[:0], y[:0], tf.zeros([0]))
    np.testing.assert_array_equal(flat(nothing), 0.0)
    assert not caplog.records, "it has a closed form"


@pytest.mark.all
def test_under_a_vectorised_map_over_clients():
    clients = [normal_weights(SMALL, seed) for seed in range(2)]
    examples = [draw_examples(SMALL, 3, seed) for seed in range(2)]
    x, y = (tf.stack(tensors) for tensors in zip(*examples, strict=True))
    stacked = {name: tf.stack([client[name] for client in clients]) for name in clients[0]}

    def gradient(client):
        weights, x, y = client
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean(SMALL.loss(weights, x, y))
        return tape.gradient(loss, weights)

    result = tf.function(lambda: tf.vectorized_map(gradient, (stacked, x, y)))()
    for index, client in enumerate(clients):
        expected = flat(gradient((in_float64(client), tf.cast(x[index], tf.float64), y[index])))
        own = flat({name: value[index] for name, value in result.items()})
        bound = probable_gamma(network_roundings(client, 3, 6 * 5))
        np.testing.assert_allclose(own, expected, atol=bound * np.abs(expected).max())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (28, 28)}, "height x width x channels"),
        ({"input_shape": (3, 9, 1)}, "3 stages need examples of at least 4 x 4, not 3 x 9"),
        ({"blocks_per_stage": 0}, "model.blocks_per_stage must be a whole number of at least 1, not 0"),
        ({"channels": ()}, "model.channels"),
        ({"channels": (0, 8)}, "model.channels"),
        ({"channels": (16, 8)}, "must not decrease"),
        ({"group_norm_groups": 0}, "model.group_norm_groups must be a whole number of at least 1, not 0"),
        ({"group_norm_groups": 5}, "group_norm_groups 5 must divide"),
    ],
)
def test_sizes_that_make_no_network_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_from_settings("resnet20", **{"input_shape": (28, 28, 1), "num_classes": 3, **arguments})
