import numpy as np
import pytest
import tensorflow as tf

from tests.models.float64_support import in_float64, keras_in_float64, rounding
from tests.models.settings_support import build_from_settings
from tests.rounding import gamma
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import MODELS
from tff_pdp.models.convolutional import build_cnn


def test_the_defaults_are_the_emnist_network():
    model = MODELS.find("cnn")((28, 28, 1), 62)
    shapes = {name: array.shape for name, array in model.init(0).items()}
    assert shapes == {
        "conv_0/kernel": (3, 3, 1, 32),
        "conv_0/bias": (32,),
        "conv_1/kernel": (3, 3, 32, 64),
        "conv_1/bias": (64,),
        "dense_0/kernel": (12 * 12 * 64, 128),
        "dense_0/bias": (128,),
        "dense_1/kernel": (128, 62),
        "dense_1/bias": (62,),
    }
    assert model.head == ("dense_1/kernel", "dense_1/bias")
    x = tf.constant(np.random.default_rng(1).random((3, 28, 28, 1)))
    with keras_in_float64():
        reference = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(32, 3, activation="relu", input_shape=(28, 28, 1)),
                tf.keras.layers.Conv2D(64, 3, activation="relu"),
                tf.keras.layers.MaxPool2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(128, activation="relu"),
                tf.keras.layers.Dense(62),
            ]
        )
    weights = in_float64(model.init(0))
    reference.set_weights(list(weights.values()))
    expected = reference(x)
    np.testing.assert_allclose(model.predict(weights, x), expected, atol=rounding(weights, expected))


@pytest.mark.parametrize(
    ("input_shape", "kernel_size", "num_classes", "num_parameters"),
    [
        # 28 -> 26 -> 13 -> 11 -> 5; 32 -> 30 -> 15 -> 13 -> 6; 32 -> 28 -> 14 -> 10 -> 5.
        ((28, 28, 1), 3, 10, 320 + 18_496 + (25 * 64 + 1) * 10),
        ((32, 32, 3), 3, 10, 896 + 18_496 + (36 * 64 + 1) * 10),
        ((32, 32, 1), 5, 0, 832 + 51_264 + (25 * 64 + 1)),
    ],
)
def test_pooling_after_each_convolution_and_no_hidden_layer(input_shape, kernel_size, num_classes, num_parameters):
    model = MODELS.find("cnn")(input_shape, num_classes, kernel_size=kernel_size, hidden_units=0, pool_after="each")
    assert model.num_parameters() == num_parameters
    assert model.head == ("dense_0/kernel", "dense_0/bias")
    with keras_in_float64():
        reference = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(32, kernel_size, activation="relu", input_shape=input_shape),
                tf.keras.layers.MaxPool2D(),
                tf.keras.layers.Conv2D(64, kernel_size, activation="relu"),
                tf.keras.layers.MaxPool2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(num_classes or 1),
            ]
        )
    weights = in_float64(model.init(0))
    reference.set_weights(list(weights.values()))
    rng = np.random.default_rng(1)
    x = tf.constant(rng.random((3, *input_shape)))
    with tf.GradientTape() as own_tape, tf.GradientTape() as tape:
        own_tape.watch(weights)
        own, other = model.predict(weights, x), reference(x)
        other = other if num_classes else other[:, 0]
    np.testing.assert_allclose(own, other, atol=rounding(weights, other))
    # Where an activation stands beside the pooling must not be seen in the gradients either.
    cotangent = tf.constant(rng.normal(size=own.shape))
    expected = tape.gradient(other, reference.trainable_variables, output_gradients=cotangent)
    for mine, theirs in zip(
        own_tape.gradient(own, weights, output_gradients=cotangent).values(), expected, strict=True
    ):
        bound = rounding(weights, theirs, examples=3, positions=input_shape[0] * input_shape[1])
        np.testing.assert_allclose(mine, theirs, atol=bound)


MCMAHAN = {"kernel_size": 5, "hidden_units": 512, "pool_after": "each", "padding": "same"}


@pytest.mark.parametrize(
    ("input_shape", "num_parameters"),
    [
        # 28 -> 14 -> 7; the paper states this number.
        ((28, 28, 1), 1_663_370),
        # 32 -> 16 -> 8.
        ((32, 32, 3), (75 + 1) * 32 + (800 + 1) * 64 + (8 * 8 * 64 + 1) * 512 + (512 + 1) * 10),
    ],
)
def test_same_padding_makes_the_network_of_mcmahan_et_al(input_shape, num_parameters):
    model = build_from_settings("cnn", input_shape, 10, **MCMAHAN)
    assert model.num_parameters() == num_parameters
    with keras_in_float64():
        reference = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(32, 5, padding="same", activation="relu", input_shape=input_shape),
                tf.keras.layers.MaxPool2D(),
                tf.keras.layers.Conv2D(64, 5, padding="same", activation="relu"),
                tf.keras.layers.MaxPool2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(512, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
    weights = in_float64(model.init(0))
    reference.set_weights(list(weights.values()))
    x = tf.constant(np.random.default_rng(1).random((3, *input_shape)))
    expected = reference(x)
    np.testing.assert_allclose(model.predict(weights, x), expected, atol=rounding(weights, expected))


def test_without_classes_the_loss_is_half_the_squared_error():
    model = build_cnn((4, 4, 1), 0, (2,), 3, 5)
    weights, x = model.init(0), tf.random.stateless_uniform([2, 4, 4, 1], [1, 2])
    values = model.predict(weights, x)
    # A sum that is no larger than 6 and the difference of 3 are rounded, twice in a square, which is once more.
    assert np.abs(values).max() <= 3
    np.testing.assert_allclose(model.loss(weights, x, values + 3.0), [4.5, 4.5], rtol=gamma(2 * (2 + 1) + 1))


def test_shift_and_scale_come_before_the_first_convolution():
    plain = build_cnn((4, 4, 1), 3, (2,), 3, 5)
    shifted = build_cnn((4, 4, 1), 3, (2,), 3, 5, input_shift=-1.0, input_scale=2.0)
    weights, x = in_float64(plain.init(0)), tf.random.stateless_uniform([2, 4, 4, 1], [1, 2], dtype=tf.float64)
    expected = plain.predict(weights, (x - 1.0) * 2.0)
    np.testing.assert_allclose(shifted.predict(weights, x), expected, atol=rounding(weights, expected))


def test_group_norm_stands_between_convolution_and_relu():
    model = build_cnn((6, 5, 2), 3, (4, 6), 2, 5, group_norm_groups=2)
    weights = model.init(0)
    assert weights["norm_0/scale"].tolist() == [1.0] * 4
    assert weights["norm_1/bias"].tolist() == [0.0] * 6
    x = tf.random.stateless_uniform([2, 6, 5, 2], [1, 2])
    # The scale of the convolution is normalised away, where a variance leaves nothing of the epsilon that comes to it.
    exact = in_float64(weights)
    large, larger = ({**exact, "conv_0/kernel": 2.0**power * exact["conv_0/kernel"]} for power in (30, 37))
    expected = model.predict(large, tf.cast(x, tf.float64))
    bound = rounding(weights, expected, positions=5 * 4)
    np.testing.assert_allclose(model.predict(larger, tf.cast(x, tf.float64)), expected, atol=bound)
    # Negative before the ReLU everywhere: nothing is left but the head's bias.
    dead = {**weights, "norm_1/bias": np.full(6, -1e3, np.float32)}
    np.testing.assert_array_equal(model.predict(dead, x), np.zeros([2, 3]))


def test_initial_weights_follow_the_seed_and_are_glorot_uniform():
    model = build_cnn((8, 8, 3), 4)
    first, again, other = model.init(0), model.init(0), model.init(1)
    for name, array in first.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, again[name])
    kernel = first["conv_1/kernel"]
    assert not np.array_equal(kernel, other["conv_1/kernel"])
    limit = np.sqrt(6 / (9 * 32 + 9 * 64))
    assert 0.99 * limit < np.abs(kernel).max() <= limit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (5, 9, 1)}, "at least 6 x 6, not 5 x 9"),
        ({"input_shape": (28, 28)}, "height x width x channels"),
        ({"channels": ()}, "channels"),
        ({"channels": (8, 0)}, "channels"),
        ({"kernel_size": 0}, "model.kernel_size must be a whole number of at least 1, not 0"),
        ({"hidden_units": -1}, "model.hidden_units must be .*, not -1"),
        ({"padding": "full"}, "model.padding must be one of same, valid, not 'full'"),
        ({"input_shape": (3, 9, 1), "pool_after": "each", "padding": "same"}, "at least 4 x 4, not 3 x 9"),
        ({"input_shape": (1, 9, 1), "padding": "same"}, "at least 2 x 2, not 1 x 9"),
        ({"pool_after": "every"}, "model.pool_after must be one of each, last, not 'every'"),
        ({"input_shape": (9, 12, 1), "pool_after": "each"}, "at least 10 x 10, not 9 x 12"),
        ({"input_shape": (20, 15, 1), "pool_after": "each", "kernel_size": 5}, "at least 16 x 16, not 20 x 15"),
        ({"group_norm_groups": -2}, "model.group_norm_groups must be a whole number of at least 0, not -2"),
        ({"group_norm_groups": 3}, "must divide"),
    ],
)
def test_sizes_that_make_no_network_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_from_settings("cnn", **{"input_shape": (28, 28, 1), "num_classes": 3, **arguments})


def test_the_smallest_input():
    model = build_cnn((6, 6, 1), 3, (1, 1), 3, 1)
    assert model.predict(model.init(0), tf.zeros([2, 6, 6, 1])).shape == (2, 3)
    assert model.num_parameters() == (9 + 1) + (9 + 1) + (1 + 1) + (3 + 3)
    pooled = build_cnn((16, 16, 1), 3, (1, 1), 5, 0, pool_after="each")
    assert pooled.predict(pooled.init(0), tf.zeros([2, 16, 16, 1])).shape == (2, 3)
    assert pooled.num_parameters() == (25 + 1) + (25 + 1) + (3 + 3)
