import numpy as np
import pytest
import tensorflow as tf

from tests.models.settings_support import build_from_settings
from tests.rounding import ELEMENTARY, gamma
from tff_pdp.errors import ConfigError
from tff_pdp.models.dense import build_linear, build_mlp


def test_forward_pass_by_hand():
    model = build_mlp((2, 1, 1), 2, (1,), input_shift=-1.0, input_scale=2.0)
    weights = {
        "dense_0/kernel": np.array([[1.0], [-1.0]], np.float32),
        "dense_0/bias": np.array([0.5], np.float32),
        "dense_1/kernel": np.array([[2.0, -3.0]], np.float32),
        "dense_1/bias": np.array([0.0, 1.0], np.float32),
    }
    # (3 - 1) * 2 = 4 and (2 - 1) * 2 = 2, so the hidden unit is 4 - 2 + 0.5 = 2.5; the other example's is negative.
    x = tf.constant([[[[3.0]], [[2.0]]], [[[0.0]], [[3.0]]]])
    np.testing.assert_array_equal(model.predict(weights, x), [[5.0, -6.5], [0.0, 1.0]])


def test_loss_of_equal_logits_is_the_logarithm_of_the_classes():
    model = build_linear((2, 2, 1), 5)
    losses = model.loss(model.init(0), tf.ones([3, 2, 2, 1]), tf.constant([0, 1, 4]))
    # Exponentials of zero, their sum, a logarithm.
    np.testing.assert_allclose(losses, np.full(3, np.log(5)), rtol=gamma(2 * ELEMENTARY + 5))


def test_softmax_regression_on_mnist_has_7850_weights_that_start_at_zero():
    model = build_from_settings("linear", (28, 28, 1), 10)
    assert model.num_parameters() == 7_850
    assert all(not array.any() for array in model.init(0).values())
    # One softmax: outputs are scores without bounds, and only answers add up to 1.
    weights = {"dense_0/kernel": np.full((784, 10), 3.0, np.float32), "dense_0/bias": np.arange(10, dtype=np.float32)}
    outputs = model.predict(weights, tf.ones([1, 28, 28, 1]))
    np.testing.assert_array_equal(outputs, [2352.0 + np.arange(10)])
    np.testing.assert_allclose(tf.reduce_sum(model.answers(outputs)), 1.0, rtol=gamma(2 * ELEMENTARY + 20))


def test_initial_weights_follow_the_seed_and_break_symmetry():
    model = build_mlp((4, 4, 1), 3, (8,))
    first, again, other = model.init(0), model.init(0), model.init(1)
    kernel = first["dense_0/kernel"]
    np.testing.assert_array_equal(kernel, again["dense_0/kernel"])
    assert not np.array_equal(kernel, other["dense_0/kernel"])
    assert len(np.unique(kernel)) > 1
    assert model.num_parameters() == 16 * 8 + 8 + 8 * 3 + 3


def test_a_layer_without_units_is_refused():
    with pytest.raises(ConfigError, match="hidden_units"):
        build_from_settings("mlp", (4, 4, 1), 3, hidden_units=[8, 0])


def test_without_classes_it_is_a_regression_of_one_value():
    model = build_mlp((2,), 0, (1,))
    weights = {
        "dense_0/kernel": np.array([[1.0], [-1.0]], np.float32),
        "dense_0/bias": np.array([0.5], np.float32),
        "dense_1/kernel": np.array([[2.0]], np.float32),
        "dense_1/bias": np.array([1.0], np.float32),
    }
    assert {name: array.shape for name, array in model.init(0).items()} == {
        name: array.shape for name, array in weights.items()
    }
    # The hidden units are 3 - 1 + 0.5 = 2.5 and, below zero, nothing.
    x, y = tf.constant([[3.0, 1.0], [0.0, 4.0]]), tf.constant([5.0, 1.0])
    np.testing.assert_array_equal(model.predict(weights, x), [6.0, 1.0])
    metrics = model.example_metrics(weights, x, y)
    np.testing.assert_array_equal(metrics["squared_error"], [1.0, 0.0])
    np.testing.assert_array_equal(metrics["loss"], [0.5, 0.0])


def test_the_linear_classifier_needs_classes():
    with pytest.raises(ConfigError, match="use 'linear_regression'"):
        build_linear((2,), 0)


def test_linear_model_has_only_a_head():
    model = build_linear((2, 2, 1), 3)
    assert set(model.head) == set(model.init(0))
    assert model.num_parameters() == 4 * 3 + 3


def test_it_is_a_classifier_of_integer_labels_with_accuracy_and_loss():
    model = build_linear((2, 1, 1), 2)
    assert model.label_dtype is np.int64
    assert (model.metric.name, model.metric.higher_is_better) == ("accuracy", True)
    weights = {
        "dense_0/kernel": np.array([[1.0, 0.0], [0.0, 1.0]], np.float32),
        "dense_0/bias": np.zeros(2, np.float32),
    }
    x = tf.reshape(tf.constant([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), [3, 2, 1, 1])
    metrics = model.example_metrics(weights, x, tf.constant([0, 1, 1], tf.int64))
    assert list(metrics) == ["accuracy", "loss"]
    np.testing.assert_array_equal(metrics["accuracy"], [1.0, 1.0, 0.0])
    right, wrong = np.log(1 + np.exp(-1)), np.log(1 + np.exp(1))
    # Of exact logits, of which the larger one is subtracted: two exponentials, a sum of up to 1.4, its logarithm (which
    # is as small as 0.31), a difference.
    bound = gamma(2 * ELEMENTARY + 2) * 1.4 / 0.31 + gamma(ELEMENTARY + 1)
    np.testing.assert_allclose(metrics["loss"], [right, right, wrong], rtol=bound)
