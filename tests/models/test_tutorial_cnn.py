"""The CNN of TensorFlow Privacy's tutorial: its weights, against Keras, and each example's gradient."""

import numpy as np
import pytest
import tensorflow as tf

from tests.models.float64_support import in_float64, keras_in_float64, per_example_norms, rounding
from tests.models.settings_support import build_from_settings
from tests.rounding import network_roundings, probable_gamma
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import MODELS
from tff_pdp.models.convolutional import build_tutorial_cnn
from tff_pdp.privacy.mechanisms import per_example
from tff_pdp.privacy.mechanisms.per_example import clipped_sum

# Odd and even sizes: 13 -> 7 -> 6 -> 2 -> 1, and 16 -> 8 -> 7 -> 2 -> 1.
SMALL = build_tutorial_cnn((13, 16, 2), 3)


def draw_examples(model, num_examples, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, *model.input_shape))
    return tf.constant(x, tf.float32), tf.constant(rng.integers(0, model.num_classes, num_examples))


def keras_network(input_shape, num_classes):
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, 8, strides=2, padding="same", activation="relu", input_shape=input_shape),
            tf.keras.layers.MaxPool2D(2, 1),
            tf.keras.layers.Conv2D(32, 4, strides=2, padding="valid", activation="relu"),
            tf.keras.layers.MaxPool2D(2, 1),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(num_classes),
        ]
    )


def test_it_has_26010_weights_on_mnist():
    model = MODELS.find("tutorial_cnn")((28, 28, 1), 10)
    # 28 -> 14 -> 13 -> 5 -> 4.
    shapes = {name: array.shape for name, array in model.init(0).items()}
    assert list(shapes.items()) == [
        ("conv_0/kernel", (8, 8, 1, 16)),
        ("conv_0/bias", (16,)),
        ("conv_1/kernel", (4, 4, 16, 32)),
        ("conv_1/bias", (32,)),
        ("dense_0/kernel", (4 * 4 * 32, 32)),
        ("dense_0/bias", (32,)),
        ("dense_1/kernel", (32, 10)),
        ("dense_1/bias", (10,)),
    ]
    assert model.num_parameters() == 1_040 + 8_224 + 16_416 + 330 == 26_010
    assert (model.name, model.head) == ("tutorial_cnn", ("dense_1/kernel", "dense_1/bias"))


@pytest.mark.parametrize("input_shape", [(28, 28, 1), (13, 16, 2), (14, 19, 3)])
def test_forward_and_backward_pass_are_those_of_keras(input_shape):
    model = build_tutorial_cnn(input_shape, 10)
    with keras_in_float64():
        reference = keras_network(input_shape, 10)
    weights = in_float64(model.init(0))
    reference.set_weights(list(weights.values()))
    rng = np.random.default_rng(1)
    x = tf.constant(rng.normal(size=(3, *input_shape)))
    with tf.GradientTape() as own_tape, tf.GradientTape() as tape:
        own_tape.watch(weights)
        own, other = model.predict(weights, x), reference(x)
    np.testing.assert_allclose(own, other, atol=rounding(weights, other))
    cotangent = tf.constant(rng.normal(size=own.shape))
    expected = tape.gradient(other, reference.trainable_variables, output_gradients=cotangent)
    found = own_tape.gradient(own, weights, output_gradients=cotangent)
    for mine, theirs in zip(found.values(), expected, strict=True):
        bound = rounding(weights, theirs, examples=3, positions=input_shape[0] * input_shape[1])
        np.testing.assert_allclose(mine, theirs, atol=bound)


def flat(weights):
    return np.concatenate([np.ravel(value) for value in weights.values()])


def gradient_of_sum(weights, x, y):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        total = tf.reduce_sum(SMALL.loss(weights, x, y))
    return tape.gradient(total, weights)


def test_each_examples_gradient_is_clipped_by_closed_forms(caplog, monkeypatch):
    monkeypatch.setattr(per_example, "_models_logged", set())
    weights = {name: tf.constant(array) for name, array in SMALL.init(0).items()}
    x, y = draw_examples(SMALL, 5)
    exact = in_float64(weights)
    rows = np.stack(
        [flat(gradient_of_sum(exact, tf.cast(x[i : i + 1], tf.float64), y[i : i + 1])) for i in range(len(y))]
    )
    norms = np.linalg.norm(rows, axis=1)
    clip_norm, included = np.median(norms).item(), np.array([1.0, 1.0, 0.0, 1.0, 1.0])
    expected = (rows * (included * np.minimum(1, clip_norm / norms))[:, np.newaxis]).sum(axis=0)

    def clip(x, y, included):
        total = clipped_sum(SMALL, weights, x, y, clip_norm=tf.constant(clip_norm, tf.float32), included=included)
        return total, per_example_norms(SMALL, weights, x, y)

    total, own_norms = clip(x, y, tf.constant(included, tf.float32))
    assert list(total) == list(weights)
    # The norms also sum the squares of a gradient.
    bound = probable_gamma(network_roundings(weights, 5, 13 * 16) + rows.shape[1])
    np.testing.assert_allclose(own_norms, norms, rtol=bound)
    np.testing.assert_allclose(flat(total), expected, atol=2 * bound * np.abs(expected).max())
    nothing, _ = clip(x[:0], y[:0], tf.zeros([0]))
    np.testing.assert_array_equal(flat(nothing), 0.0)
    assert not caplog.records, "it has a closed form"


@pytest.mark.all
def test_clipped_sums_under_a_vectorised_map_over_clients():
    weights = {name: tf.constant(array) for name, array in SMALL.init(0).items()}
    x, y = (tf.stack(parts) for parts in zip(*(draw_examples(SMALL, 3, seed) for seed in range(2)), strict=True))

    def clip(client):
        x, y = client
        return clipped_sum(SMALL, weights, x, y, clip_norm=tf.constant(0.5), included=tf.ones([3]))

    result = tf.function(lambda: tf.vectorized_map(clip, (x, y), fallback_to_while_loop=False))()
    bound = 2 * probable_gamma(network_roundings(weights, 3, 13 * 16) + SMALL.num_parameters())
    for index in range(2):
        expected = flat(clip((x[index], y[index])))
        own = flat({name: value[index] for name, value in result.items()})
        np.testing.assert_allclose(own, expected, atol=bound * np.abs(expected).max())


def test_shift_and_scale_come_first_and_without_classes_it_is_a_regression():
    plain = build_tutorial_cnn((13, 13, 1), 0)
    shifted = build_tutorial_cnn((13, 13, 1), 0, input_shift=-1.0, input_scale=2.0)
    weights, x = in_float64(plain.init(0)), tf.random.stateless_uniform([2, 13, 13, 1], [1, 2], dtype=tf.float64)
    expected = plain.predict(weights, (x - 1.0) * 2.0)
    assert expected.shape == (2,)
    np.testing.assert_allclose(shifted.predict(weights, x), expected, atol=rounding(weights, expected))


def test_initial_weights_follow_the_seed():
    first, again, other = (SMALL.init(seed) for seed in (0, 0, 1))
    for name, array in first.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, again[name])
    assert not np.array_equal(first["conv_0/kernel"], other["conv_0/kernel"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (28, 28)}, r"height x width x channels, not of shape \[28, 28\]"),
        ({"input_shape": (12, 28, 1)}, "model.kind 'tutorial_cnn' needs examples of at least 13 x 13, not 12 x 28"),
        ({"channels": (8, 8)}, "unknown key model.channels"),
    ],
)
def test_settings_that_make_no_network_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_from_settings("tutorial_cnn", **{"input_shape": (28, 28, 1), "num_classes": 3, **arguments})
