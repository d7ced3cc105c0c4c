import numpy as np
import pytest
import tensorflow as tf

from tests.models.float64_support import in_float64, keras_in_float64, rounding
from tests.models.settings_support import build_from_settings
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import MODELS


def test_the_defaults_are_the_target_network_of_pfedhn():
    model = MODELS.find("lenet")((32, 32, 3), 10)
    assert model.name == "lenet"
    # 32 -> 28 -> 14 -> 10 -> 5.
    shapes = {name: array.shape for name, array in model.init(0).items()}
    assert list(shapes.items()) == [
        ("conv_0/kernel", (5, 5, 3, 16)),
        ("conv_0/bias", (16,)),
        ("conv_1/kernel", (5, 5, 16, 32)),
        ("conv_1/bias", (32,)),
        ("dense_0/kernel", (800, 120)),
        ("dense_0/bias", (120,)),
        ("dense_1/kernel", (120, 84)),
        ("dense_1/bias", (84,)),
        ("dense_2/kernel", (84, 10)),
        ("dense_2/bias", (10,)),
    ]
    assert model.head == ("dense_2/kernel", "dense_2/bias")
    assert model.num_parameters() == 1_216 + 12_832 + 96_120 + 10_164 + 850
    with keras_in_float64():
        reference = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(16, 5, activation="relu", input_shape=(32, 32, 3)),
                tf.keras.layers.MaxPool2D(),
                tf.keras.layers.Conv2D(32, 5, activation="relu"),
                tf.keras.layers.MaxPool2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(120, activation="relu"),
                tf.keras.layers.Dense(84, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
    weights = in_float64(model.init(0))
    reference.set_weights(list(weights.values()))
    x = tf.constant(np.random.default_rng(1).random((3, 32, 32, 3)))
    expected = reference(x)
    np.testing.assert_allclose(model.predict(weights, x), expected, atol=rounding(weights, expected))


def test_arguments():
    # 28 -> 26 -> 13 -> 11 -> 5.
    plain = MODELS.find("lenet")((28, 28, 1), 0, channels=(2, 4), kernel_size=3, hidden_units=(7,))
    assert plain.num_parameters() == (9 + 1) * 2 + (18 + 1) * 4 + (100 + 1) * 7 + 8
    shifted = MODELS.find("lenet")((28, 28, 1), 0, (2, 4), 3, (7,), input_shift=-1.0, input_scale=2.0)
    weights, x = in_float64(plain.init(0)), tf.random.stateless_uniform([2, 28, 28, 1], [1, 2], dtype=tf.float64)
    expected = plain.predict(weights, (x - 1.0) * 2.0)
    np.testing.assert_allclose(shifted.predict(weights, x), expected, atol=rounding(weights, expected))
    assert plain.predict(weights, x).shape == (2,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (15, 28, 1)}, "2 convolutions with kernel_size 5 .* at least 16 x 16, not 15 x 28"),
        ({"channels": (8, 0)}, r"model.channels must be .*at least 1, not \(8, 0\)"),
        ({"hidden_units": (120, 0)}, r"model.hidden_units must be .*at least 1, not \(120, 0\)"),
    ],
)
def test_sizes_that_make_no_network_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_from_settings("lenet", **{"input_shape": (28, 28, 1), "num_classes": 3, **arguments})
