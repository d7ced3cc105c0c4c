"""The loss and the metric that an experiment chooses by name, and models from outside."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.experiment import model as module
from tff_pdp.experiment.model import build_model
from tff_pdp.models.losses import lower_is_better


def built(num_classes=3, is_private=False, **given):
    config = SimpleNamespace(
        model={"kind": "linear" if num_classes else "linear_regression", **given},
        data=SimpleNamespace(input_shape=(2,), num_classes=num_classes),
        privacy=SimpleNamespace(is_private=is_private),
    )
    return build_model(config)  # type: ignore[arg-type]


LOGITS = tf.constant([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
LABELS = tf.constant([2, 0], tf.int64)


def test_a_metric_of_each_example_is_measured_beside_accuracy():
    model = built(metric={"kind": "top_k_accuracy", "k": 2})
    assert (model.metric.name, model.metric.higher_is_better) == ("top_k_accuracy", True)
    measured = model.output_metrics(LOGITS, LABELS)
    np.testing.assert_array_equal(measured["top_k_accuracy"], [1.0, 0.0])
    # Private choices and searches go on by this one.
    np.testing.assert_array_equal(measured["accuracy"], [0.0, 0.0])


def test_an_error_is_better_if_it_is_smaller():
    model = built(0, metric="mean_absolute_error", loss={"kind": "huber", "delta": 0.5})
    assert (model.metric.name, model.metric.higher_is_better) == ("mean_absolute_error", False)
    measured = model.output_metrics(tf.constant([1.0, 2.0]), tf.constant([3.0, 2.25]))
    np.testing.assert_array_equal(measured["mean_absolute_error"], [2.0, 0.25])
    # 0.5 * (2 - 0.25), and half of 0.25^2.
    np.testing.assert_array_equal(measured["loss"], [0.875, 0.03125])


def test_models_keep_their_metrics_by_name():
    assert built(metric="accuracy").metric.name == "accuracy"
    assert built(0, metric="mean_squared_error").metric.name == "mean_squared_error"
    assert built(2, metric="average_precision").metric.name == "average_precision"


def pinball_like(outputs, y, *, factor: float = 2.0):
    return factor * tf.abs(outputs - y)


@lower_is_better
def largest_error(outputs, y):
    return tf.abs(outputs - y)


def mixing(outputs, y):
    return tf.square(outputs - y - tf.reduce_mean(outputs))


def total(outputs, y):
    return tf.reduce_sum(outputs - y)


def build_batch_norm(input_shape, num_classes):
    layers = [tf.keras.Input(input_shape), tf.keras.layers.Dense(3), tf.keras.layers.BatchNormalization(name="inner")]
    return tf.keras.Sequential([*layers, tf.keras.layers.Dense(num_classes)])


def build_keras(input_shape, num_classes):
    return tf.keras.Sequential([tf.keras.Input(input_shape), tf.keras.layers.Dense(num_classes)])


def build_nothing(input_shape, num_classes):
    return None


def test_losses_and_metrics_may_come_from_outside():
    model = built(0, True, loss={"kind": f"{__name__}:pinball_like", "factor": 3.0}, metric=f"{__name__}:largest_error")
    measured = model.output_metrics(tf.constant([1.0]), tf.constant([3.0]))
    assert (measured["loss"].numpy(), measured["largest_error"].numpy()) == ([6.0], [2.0])
    assert not model.metric.higher_is_better


@pytest.mark.parametrize(
    ("num_classes", "given", "message"),
    [
        (3, {"loss": "huber"}, "model.loss 'huber' .*num_classes 3"),
        (0, {"loss": "softmax_cross_entropy"}, "model.loss 'softmax_cross_entropy' .*num_classes 0"),
        (3, {"loss": "hinge"}, "separates 2 classes, but data.num_classes is 3"),
        (3, {"loss": "hubert"}, "model.loss: unknown kind 'hubert'.*huber"),
        (0, {"loss": {"kind": "huber", "delta": -1.0}}, "delta"),
        (0, {"loss": {"kind": "huber", "detla": 1.0}}, "detla.*delta"),
        (0, {"loss": {"delta": 1.0}}, "must be a name, or a mapping"),
        (0, {"loss": f"{__name__}:total"}, "not one for each example"),
        (3, {"metric": "average_precision"}, "ranks 2 classes"),
        (3, {"metric": "mean_squared_error"}, "does not suit"),
        (0, {"metric": "top_k_accuracy"}, "model.metric 'top_k_accuracy'"),
        (3, {"kind": f"{__name__}:build_nothing"}, "returned NoneType"),
    ],
)
def test_what_does_not_suit_is_refused(num_classes, given, message):
    with pytest.raises(ConfigError, match=message):
        built(num_classes, **given)


def test_a_loss_that_mixes_examples_is_refused_where_a_plan_is_private():
    built(0, False, loss=f"{__name__}:mixing")
    with pytest.raises(ConfigError, match="change with other examples"):
        built(0, True, loss=f"{__name__}:mixing")


def test_keras_models_are_drawn_from_the_seed_and_checked_once(monkeypatch):
    state = np.random.get_state()[1].copy()
    first, again, other = (built(kind=f"{__name__}:build_keras", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(np.random.get_state()[1], state)
    kernels = [model.init(0)["dense/kernel"] for model in (first, again, other)]
    assert np.array_equal(kernels[0], kernels[1]) and not np.array_equal(kernels[0], kernels[2])
    assert first.name == f"{__name__}:build_keras"
    checked = []
    monkeypatch.setattr(module, "check_model_treats_examples_apart", checked.append)
    monkeypatch.setattr(module, "_checked", set())
    for seed in (1, 1):
        built(kind=f"{__name__}:build_keras", seed=seed, is_private=True)
    built(kind="linear", is_private=True)
    assert len(checked) == 1


def test_batch_normalisation_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'inner' \(BatchNormalization\)"):
        built(kind=f"{__name__}:build_batch_norm")
