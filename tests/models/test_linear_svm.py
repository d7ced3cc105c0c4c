import math

import numpy as np
import pytest
import tensorflow as tf

from tests.models.float64_support import per_example_norms
from tests.rounding import ELEMENTARY, gamma
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.kinds import MODELS
from tff_pdp.models.dense import hinge
from tff_pdp.privacy.mechanisms.per_example import clipped_sum

WEIGHTS = {"dense_0/kernel": np.array([[2.0], [-1.0]], np.float32), "dense_0/bias": np.array([0.5], np.float32)}
# Scores 2 + 0.5 = 2.5, -4 + 0.5 = -3.5, 1 - 1.25 + 0.5 = 0.25 and -1 + 0.5 = -0.5.
X = tf.constant([[1.0, 0.0], [0.0, 4.0], [0.5, 1.25], [0.0, 1.0]])
# Right and beyond the margin; wrong; right but inside the margin; wrong inside the margin.
Y = tf.constant([1, 1, 1, 1], tf.int64)


def test_scores_loss_and_metrics_by_hand():
    model = MODELS.find("linear_svm")((2,), 2)
    np.testing.assert_array_equal(model.predict(WEIGHTS, X), [[0, 2.5], [0, -3.5], [0, 0.25], [0, -0.5]])
    metrics = model.example_metrics(WEIGHTS, X, Y)
    assert list(metrics) == ["accuracy", "loss"]
    np.testing.assert_array_equal(metrics["accuracy"], [1, 0, 1, 0])
    np.testing.assert_array_equal(metrics["loss"], [0, 4.5, 0.75, 1.5])
    # Of the other class, signs are turned.
    np.testing.assert_array_equal(model.loss(WEIGHTS, X, 1 - Y), [3.5, 0, 1.25, 0.5])
    np.testing.assert_array_equal(model.example_metrics(WEIGHTS, X, 1 - Y)["accuracy"], [0, 1, 0, 1])
    # Of exact scores the exponential, a sum and a quotient.
    probability = model.answers(model.predict(WEIGHTS, X))[0, 1]
    np.testing.assert_allclose(probability, 1 / (1 + math.exp(-2.5)), rtol=gamma(ELEMENTARY + 2))


def test_the_loss_sees_only_the_difference_of_the_outputs():
    np.testing.assert_array_equal(
        hinge(tf.constant([[1.0, 1.5], [0.0, 0.5], [3.0, 0.0]]), Y[:3] * [1, 0, 0]), [0.5, 1.5, 0.0]
    )


def test_it_starts_from_zero_with_one_kernel_for_both_classes():
    model = MODELS.find("linear_svm")((3, 2, 1), 2, input_shift=-1.0, input_scale=2.0)
    initial = model.init(7)
    assert (model.name, model.num_classes, model.label_dtype) == ("linear_svm", 2, np.int64)
    assert model.metric.name == "accuracy"
    assert model.num_parameters() == 6 + 1
    assert set(model.head) == set(initial)
    assert not any(array.any() for array in initial.values())
    # Each of the six features is (2 - 1) * 2.
    ones = {name: np.ones_like(array) for name, array in initial.items()}
    np.testing.assert_array_equal(model.predict(ones, tf.fill([1, 3, 2, 1], 2.0)), [[0.0, 13.0]])


def test_gradients_by_hand_and_by_differences(caplog):
    model = MODELS.find("linear_svm")((2,), 2)
    # Outside the margin nothing, else -(x1, x2, 1).
    rows = -np.array([[0, 0, 0], [0, 4, 1], [0.5, 1.25, 1], [0, 1, 1]])
    # Losses are lines of up to 4.5, sums of five terms in float64, whose errors the step divides.
    step = 1e-3
    differences = _differences(model, WEIGHTS, X, Y, step)
    np.testing.assert_allclose(differences, rows, atol=gamma(2 * 5, np.float64) * 4.5 / step)
    norms = np.linalg.norm(rows, axis=1)
    # Three squares, exact or rounded once, their sum and its root. A norm of zero may come out as the root of numbers
    # that float32 is too coarse for.
    lost = math.sqrt(3 * np.finfo(np.float32).tiny)
    np.testing.assert_allclose(per_example_norms(model, WEIGHTS, X, Y), norms, rtol=gamma(5), atol=lost)
    plain = clipped_sum(model, WEIGHTS, X, Y, clip_norm=tf.constant(math.inf), included=tf.ones([4]))
    np.testing.assert_array_equal(np.append(plain["dense_0/kernel"], plain["dense_0/bias"]), [-0.5, -6.25, -3.0])
    included = np.array([1, 1, 1, 0])
    clipped = clipped_sum(model, WEIGHTS, X, Y, clip_norm=tf.constant(2.0), included=tf.constant(included, tf.float32))
    factors = included * np.minimum(1, 2 / np.maximum(norms, 1e-9))
    # All of one sign: a norm, a quotient, a product and a sum over examples.
    found = np.append(clipped["dense_0/kernel"], clipped["dense_0/bias"])
    np.testing.assert_allclose(found, factors @ rows, rtol=gamma(5 + 2 + 4))
    assert not caplog.records, "it has a closed form"


def _differences(model, weights, x, y, step):
    """Each example's gradient, by central differences of its loss in float64."""
    names = list(weights)
    flat = np.concatenate([np.ravel(weights[name]) for name in names])

    def losses(vector):
        parts = np.split(vector, np.cumsum([weights[name].size for name in names])[:-1])
        shaped = {name: np.reshape(part, weights[name].shape) for name, part in zip(names, parts, strict=True)}
        in_float64 = {name: tf.constant(part, tf.float64) for name, part in shaped.items()}
        return model.loss(in_float64, tf.cast(x, tf.float64), y).numpy()

    return np.stack(
        [(losses(flat + row) - losses(flat - row)) / (2 * step) for row in step * np.eye(flat.size)], axis=1
    )


@pytest.mark.parametrize("num_classes", [0, 1, 3])
def test_other_numbers_of_classes_are_refused(num_classes):
    with pytest.raises(ConfigError, match=f"separates 2 classes, but data.num_classes is {num_classes}"):
        MODELS.find("linear_svm")((2,), num_classes)
