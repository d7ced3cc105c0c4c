import math

import numpy as np
import pytest
import tensorflow as tf

from tests.models.float64_support import per_example_norms
from tests.rounding import gamma
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import MODELS
from tff_pdp.models.base import half_squared_error
from tff_pdp.models.dense import build_linear_regression
from tff_pdp.privacy.mechanisms.per_example import clipped_sum

WEIGHTS = {"dense_0/kernel": np.array([[2.0], [-1.0]], np.float32), "dense_0/bias": np.array([0.5], np.float32)}
# 2 * 3 - 1 + 0.5 = 5.5 and 0 - 4 + 0.5 = -3.5; off by 1.5 and -3.
X, Y = tf.constant([[3.0, 1.0], [0.0, 4.0]]), tf.constant([4.0, -0.5])


def test_forward_pass_loss_and_metrics_by_hand():
    model = build_linear_regression((2,))
    np.testing.assert_array_equal(model.predict(WEIGHTS, X), [5.5, -3.5])
    np.testing.assert_array_equal(model.loss(WEIGHTS, X, Y), [1.125, 4.5])
    np.testing.assert_array_equal(half_squared_error(tf.constant([1.0]), tf.constant([1.0])), [0.0])
    metrics = model.example_metrics(WEIGHTS, X, Y)
    assert list(metrics) == ["squared_error", "loss"]
    np.testing.assert_array_equal(metrics["squared_error"], [2.25, 9.0])
    np.testing.assert_array_equal(metrics["loss"], [1.125, 4.5])


def test_it_is_a_regression_from_zero_and_all_of_it_is_head():
    model = MODELS.find("linear_regression")((3, 2, 1), 0)
    initial = model.init(7)
    assert (model.name, model.num_classes) == ("linear_regression", 0)
    assert (model.metric.name, model.metric.higher_is_better) == ("mean_squared_error", False)
    assert model.label_dtype is np.float32
    assert set(model.head) == set(initial)
    assert model.num_parameters() == 6 + 1
    assert all(array.dtype == np.float32 and not array.any() for array in initial.values())
    assert model.predict(initial, tf.ones([5, 3, 2, 1])).shape == (5,)


def test_shift_and_scale_come_before_the_kernel():
    model = build_linear_regression((2,), input_shift=-1.0, input_scale=2.0)
    # (3 - 1) * 2 = 4 and (1 - 1) * 2 = 0, so 2 * 4 + 0.5; then -2 and 6, so -4 - 6 + 0.5.
    outputs = model.predict(WEIGHTS, X)
    np.testing.assert_array_equal(outputs, [8.5, -9.5])
    np.testing.assert_array_equal(model.answers(outputs), outputs)


def test_classes_are_refused():
    with pytest.raises(ConfigError, match=r"data.num_classes is 3: set it to 0, or use 'linear'"):
        MODELS.find("linear_regression")((2,), 3)


def test_gradients_by_hand_clipped_and_not(caplog):
    model = build_linear_regression((2,))
    # Off by r, an example's gradient is r * (x1, x2, 1).
    # Of exact gradients three squares, their sum and its root; in a clipped one also a quotient and a product.
    norms = per_example_norms(model, WEIGHTS, X, Y)
    np.testing.assert_allclose(norms, [1.5 * math.sqrt(11), 3 * math.sqrt(17)], rtol=gamma(5))
    plain = clipped_sum(model, WEIGHTS, X, Y, clip_norm=tf.constant(math.inf), included=tf.ones([2]))
    np.testing.assert_array_equal(plain["dense_0/kernel"], [[4.5], [-10.5]])
    np.testing.assert_array_equal(plain["dense_0/bias"], [-1.5])
    clipped = clipped_sum(model, WEIGHTS, X, Y, clip_norm=tf.constant(1.0), included=tf.constant([0.0, 1.0]))
    np.testing.assert_allclose(clipped["dense_0/kernel"], [[0.0], [-4 / math.sqrt(17)]], rtol=gamma(5 + 2))
    assert not caplog.records, "it has a closed form"
