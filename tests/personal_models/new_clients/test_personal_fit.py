"""Fitting new clients' own parts, in memory: what moves, what does not, and by how much noise."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from serving.models import HYPERNETWORK, PersonalModels
from tests.rounding import network_roundings, probable_gamma, standard_errors
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.data.client_dataset import ClientExamples
from tff_pdp.errors import ConfigError
from tff_pdp.models.dense import build_linear, build_linear_regression, build_mlp
from tff_pdp.models.derived import SCALE, SHIFT, with_scaled_inputs
from tff_pdp.models.hypernetwork import Hypernetwork
from tff_pdp.personal_models.new_clients.gradient_fit import fit_rows, fitted_names, measure_rows, model_of_rows
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd


def personal(model, owned, weights=None):
    weights = weights or model.init(0)
    shared = {name: array for name, array in weights.items() if name not in owned}
    # Row 1 is another client's, which nothing may depend on.
    stacked = {name: np.stack([weights[name], np.full_like(weights[name], np.nan)]) for name in owned}
    return PersonalModels(model, ["other"], np.array([1], np.int32), shared, stacked)


def clients(sizes, num_features=4, num_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    drawn = [(rng.normal(size=(size, num_features)), rng.integers(0, num_classes, size)) for size in sizes]
    return [ClientExamples(x.astype(np.float32), y.astype(np.int64)) for x, y in drawn]


def seeds(number):
    return np.random.default_rng(1).integers(0, 2**62, (number, 2))


def fit(model, own, steps=5, rate=0.2, batch_size=100):
    done = []
    rows = fit_rows(model, own, build_minibatch(model, batch_size), steps, rate, {}, seeds(len(own)), done.append)
    assert sum(done) == len(own)
    return rows


def rounding(model, steps, examples):
    """How far float32 may be off after some steps, relative to the largest of a kind of weights.

    Steps are too small to make errors grow.
    """
    return probable_gamma(steps * network_roundings(model.init(0), examples))


def test_a_head_is_fitted_as_far_as_clients_own_it_and_never_the_scaling_of_inputs():
    mlp = with_scaled_inputs(build_mlp((4,), 3))
    head, body = ("dense_1/kernel", "dense_1/bias"), ("dense_0/kernel", "dense_0/bias")
    assert set(fitted_names(personal(mlp, head))) == set(head)
    assert set(fitted_names(personal(mlp, (*head, *body, SHIFT, SCALE)))) == set(head)
    assert set(fitted_names(personal(mlp, ("dense_1/bias", *body)))) == {"dense_1/bias"}
    assert set(fitted_names(personal(mlp, (SHIFT, *body)))) == set(body)
    for nothing in ((), (SHIFT, SCALE)):
        with pytest.raises(ConfigError, match="no personal part"):
            fitted_names(personal(mlp, nothing))


def test_steps_are_those_of_gradient_descent_from_the_global_row():
    """Full batches, so that rows follow from NumPy in float64: softmax regression over a fixed ReLU layer."""
    model = build_mlp((4,), 3)
    weights = model.init(2)
    own = clients([6, 9, 6])
    rows = fit(model_of_rows(personal(model, model.head, weights), model.head), own, steps=4)
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    for place, data in enumerate(own):
        features = np.maximum(data.x @ weights["dense_0/kernel"] + weights["dense_0/bias"], 0)
        kernel, bias = weights["dense_1/kernel"].copy(), weights["dense_1/bias"].copy()
        for _ in range(4):
            logits = features @ kernel + bias
            odds = np.exp(logits - logits.max(axis=1, keepdims=True))
            errors = (odds / odds.sum(axis=1, keepdims=True) - np.eye(3)[data.y]) / len(data.y)
            kernel, bias = kernel - 0.2 * features.T @ errors, bias - 0.2 * errors.sum(axis=0)
        for name, expected in {"dense_1/kernel": kernel, "dense_1/bias": bias}.items():
            bound = rounding(model, 4, len(data.y)) * np.abs(expected).max()
            np.testing.assert_allclose(rows[name][place], expected, rtol=0, atol=bound)


def test_a_clients_row_does_not_depend_on_who_is_fitted_beside_it():
    model = build_mlp((4,), 3)
    of_head = model_of_rows(personal(model, model.head), model.head)
    own = clients([6, 40, 7])
    together = fit(of_head, own, batch_size=4)
    estimator = build_minibatch(of_head, 4)
    for place in (0, 2):
        alone = fit_rows(of_head, own[place : place + 1], estimator, 5, 0.2, {}, seeds(3)[[place]], lambda _: None)
        for name, values in together.items():
            bound = 2 * rounding(model, 5, len(own[place].y)) * np.abs(values[place]).max()
            np.testing.assert_allclose(values[place], alone[name][0], rtol=0, atol=bound)


def test_scaled_inputs_are_scaled_as_the_global_models():
    model = with_scaled_inputs(build_linear((2,), 2))
    weights = {**model.init(0), SHIFT: np.float32([1, 2]), SCALE: np.float32([3, 4])}
    models = personal(model, (*model.head, SHIFT, SCALE), weights)
    own = clients([5], 2, 2)
    rows = fit(model_of_rows(models, model.head), own)
    scaled = [ClientExamples((own[0].x + weights[SHIFT]) * weights[SCALE], own[0].y)]
    plain = build_linear((2,), 2)
    expected = fit(model_of_rows(personal(plain, plain.head, plain.init(0)), plain.head), scaled)
    assert sorted(rows) == sorted(model.head)
    for name, values in rows.items():
        # The same operations on the same numbers.
        np.testing.assert_array_equal(values, expected[name])


def test_a_descriptor_follows_the_gradient_through_the_hypernetwork():
    model = build_linear((4,), 3)
    hypernetwork = Hypernetwork(3, (5,), 2, head_scale=1.0)
    assert hypernetwork.starts_alive()
    phi = {name: np.asarray(value) for name, value in hypernetwork.init(model.init(0)).items()}
    start = np.asarray(hypernetwork.init_descriptor())
    models = PersonalModels(
        model,
        ["other"],
        np.array([1], np.int32),
        phi,
        {"descriptor": np.stack([start, np.full_like(start, np.nan)])},
        lambda shared, own: hypernetwork.generate(shared, own["descriptor"]),
        HYPERNETWORK,
    )
    assert fitted_names(models) == ("descriptor",)
    own = clients([8])
    rows = fit(model_of_rows(models, ["descriptor"]), own, steps=3, rate=0.5)
    wide, expected = {name: tf.cast(value, tf.float64) for name, value in phi.items()}, tf.cast(start, tf.float64)
    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(expected)
            weights = hypernetwork.generate(wide, expected)
            loss = tf.reduce_mean(model.loss(weights, tf.cast(own[0].x, tf.float64), own[0].y))
        expected -= 0.5 * tape.gradient(loss, expected)
    # Through the model and through the hypernetwork; curvatures are below 1, so that steps do not make errors grow.
    a_step = network_roundings(model.init(0), 8) + network_roundings(phi)
    bound = probable_gamma(3 * a_step) * np.abs(expected).max()
    np.testing.assert_allclose(rows["descriptor"][0], expected, rtol=0, atol=bound)
    assert np.abs(expected - start).max() > 0.1


def test_noise_has_the_deviation_that_the_mechanism_says():
    """Examples of zeros have no gradient by the kernel, so all that moves it is noise: T draws of z C rate / B each."""
    model = build_linear_regression((50,), 0)
    names = list(model.init(0))
    zeros = {name: np.zeros_like(array) for name, array in model.init(0).items()}
    of_rows = model_of_rows(personal(model, names, zeros), names)
    own = [ClientExamples(np.zeros((20, 50), np.float32), np.zeros(20, np.float32))] * 200
    mechanism = {"clip_norm": 0.5, "noise_multiplier": 3.0, "sampling_rate": 0.5, "expected_batch_size": 10.0}
    columns = {name: np.full(200, value) for name, value in mechanism.items()}
    rows = fit_rows(of_rows, own, build_dp_sgd(of_rows), 16, 0.1, columns, seeds(200), lambda _: None)
    expected = np.sqrt(16) * 3.0 * 0.5 * 0.1 / 10.0
    kernel = rows["dense_0/kernel"].reshape(200, 50)
    # A deviation has the standard error 1 / sqrt(2 n) of itself, a correlation of zero that of 1 / sqrt(n).
    assert kernel.std() == pytest.approx(expected, rel=standard_errors() / np.sqrt(2 * kernel.size))
    assert abs(kernel.mean()) < standard_errors() * expected / np.sqrt(kernel.size)
    correlation = np.corrcoef(kernel[:100].ravel(), kernel[100:].ravel())[0, 1]
    assert abs(correlation) < standard_errors() / np.sqrt(kernel.size / 2)


def test_metrics_are_means_over_a_clients_own_examples():
    model = build_linear((4,), 3)
    of_rows = model_of_rows(personal(model, model.head), model.head)
    own = clients([3, 50, 8])
    rows = fit(of_rows, own)
    before, after = measure_rows(of_rows, own), measure_rows(of_rows, own, rows)
    for place, data in enumerate(own):
        for measured, weights in ((before, model.init(0)), (after, {n: v[place] for n, v in rows.items()})):
            wide, x = {n: tf.constant(v, tf.float64) for n, v in weights.items()}, tf.constant(data.x, tf.float64)
            # A loss is rounded relative to the terms of two logits, and to the logarithm of the classes.
            terms = np.abs(x) @ np.abs(wide["dense_0/kernel"]) + np.abs(wide["dense_0/bias"])
            bound = rounding(model, 1, len(data.y)) * (2 * terms.max() + np.log(3))
            for name, values in model.example_metrics(wide, x, data.y).items():
                assert measured[name][place] == pytest.approx(float(np.mean(values)), abs=bound)
    assert (after["loss"] < before["loss"]).all()


def test_many_clients_are_fitted_by_one_traced_computation():
    model = build_mlp((4,), 3)
    traces = []

    def predict(weights, x):
        traces.append(1)
        return model.predict(weights, x)

    counted = dataclasses.replace(model, predict=predict)
    of_head = model_of_rows(personal(counted, model.head), model.head)
    fit(of_head, clients([5, 300]))
    few = len(traces)
    traces.clear()
    fit(of_head, clients(np.random.default_rng(0).integers(5, 300, 700)))
    assert len(traces) == few
