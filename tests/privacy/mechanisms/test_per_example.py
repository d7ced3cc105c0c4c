import dataclasses
import functools
import itertools
import logging
import math
import operator
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.float64_support import per_example_norms
from tests.rounding import gamma, network_roundings, probable_gamma
from tests.tiers import amount, parameters
from tff_pdp.models import layers
from tff_pdp.models.base import Model
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_linear, build_linear_regression, build_mlp
from tff_pdp.models.example_gradients import Held, dense_kernel
from tff_pdp.privacy.mechanisms import per_example
from tff_pdp.privacy.mechanisms.per_example import clipped_sum, sum_error

NUM_EXAMPLES = 6
NUM_CLASSES = 3


def build_custom(predict, shapes, input_shape, name="custom"):
    """A model of normal weights, whose sums are near one: no class is certain, which leaves nothing of a gradient."""

    def init(seed):
        rng = np.random.default_rng(seed)
        return {
            name: (rng.normal(size=shape) / math.sqrt(math.prod(shape[:-1]))).astype(np.float32)
            for name, shape in shapes.items()
        }

    return Model(name=name, input_shape=input_shape, num_classes=NUM_CLASSES, init=init, predict=predict, head=())


def predict_strided(weights, x):
    hidden = tf.nn.relu(layers.conv2d(weights, "conv_0", x, strides=2, padding="SAME"))
    hidden = tf.nn.relu(layers.conv2d(weights, "conv_1", hidden, padding="SAME"))
    return layers.dense(weights, "dense", tf.reduce_mean(hidden, axis=[1, 2]))


def predict_text(weights, x):
    embedded = layers.dense(weights, "embedding", tf.one_hot(tf.cast(x, tf.int32), 4, dtype=x.dtype))
    hidden = tf.nn.tanh(layers.group_norm(weights, "norm", layers.dense(weights, "hidden", embedded), groups=1))
    return layers.dense(weights, "dense", tf.reduce_max(hidden, axis=1))


def predict_by_name(weights, x):
    hidden = tf.nn.relu(layers.dense(weights, "dense", x))
    return layers.dense(weights, "dense", hidden) * weights["temperature"]


STRIDED = {"conv_0/kernel": (3, 3, 1, 2), "conv_0/bias": (2,), "conv_1/kernel": (2, 2, 2, 20), "conv_1/bias": (20,)}
TEXT = {
    "embedding/kernel": (4, 8),
    "embedding/bias": (8,),
    "hidden/kernel": (8, 40),
    "hidden/bias": (40,),
    "norm/scale": (40,),
}
MODELS = {
    "linear": build_linear((2, 2, 1), NUM_CLASSES),
    "mlp": build_mlp((2, 2, 1), NUM_CLASSES, (5, 4)),
    "cnn": build_cnn((7, 6, 2), NUM_CLASSES, (3, 4), 2, 5),
    "cnn, group norm": build_cnn((6, 6, 1), NUM_CLASSES, (2, 4), 3, 5, group_norm_groups=2),
    "cnn, strided": build_custom(
        predict_strided, {**STRIDED, "dense/kernel": (20, 3), "dense/bias": (3,)}, (4, 5, 1), "strided"
    ),
    # Four ids in three positions, so some repeat; the hidden layer takes the Gram form.
    "text": build_custom(
        predict_text, {**TEXT, "norm/bias": (40,), "dense/kernel": (40, 3), "dense/bias": (3,)}, (3,), "text"
    ),
    "not in closed form": build_custom(
        predict_by_name, {"dense/kernel": (3, 3), "dense/bias": (3,), "temperature": (1,), "unused": (2,)}, (3,)
    ),
}


def weights_of(model, seed=0):
    return {name: tf.constant(array) for name, array in model.init(seed).items()}


def draw_examples(model, num_examples=NUM_EXAMPLES, seed=0):
    rng = np.random.default_rng(seed)
    x = (
        rng.normal(size=(num_examples, *model.input_shape))
        if model.name != "text"
        else rng.integers(0, 4, (num_examples, 3))
    )
    return tf.constant(x, tf.float32), tf.constant(rng.integers(0, NUM_CLASSES, num_examples))


def flat(weights):
    return np.concatenate([np.ravel(value) for value in weights.values()])


def loss_gradient(model, weights, x, y):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        total = tf.reduce_sum(model.loss(weights, x, y))
    gradients = tape.gradient(total, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return {name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()}


def example_gradients(model, weights, x, y):
    """Each example's gradient in float64, flattened, by a tape for each: slow, independent of the code under test."""
    weights, x = {name: tf.cast(value, tf.float64) for name, value in weights.items()}, tf.cast(x, tf.float64)
    rows = [loss_gradient(model, weights, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    return np.stack([flat(row) for row in rows])


def naive_clipped_sum(rows, clip_norm, included):
    factors = np.minimum(1.0, clip_norm / np.maximum(np.linalg.norm(rows, axis=1), 1e-30)) * included
    return (rows * factors[:, np.newaxis]).sum(axis=0)


def clip(model, weights, x, y, clip_norm=math.inf, included=None, pull=None):
    x, y = tf.convert_to_tensor(x), tf.convert_to_tensor(y)
    included = tf.ones(tf.shape(y)) if included is None else tf.cast(included, tf.float32)
    return clipped_sum(model, weights, x, y, clip_norm=tf.constant(clip_norm, tf.float32), included=included, pull=pull)


def assert_close(model, result, expected, steps=1):
    """Of both passes through a model, and of norms that sum up its gradients' squares; what is expected may err too."""
    weights, positions = model.init(0), math.prod(model.input_shape[:2])
    roundings = network_roundings(weights, NUM_EXAMPLES, positions) + model.num_parameters()
    bound = 2 * probable_gamma(steps * roundings) * np.abs(expected).max()
    np.testing.assert_allclose(result, expected, atol=bound)


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_clipped_sums_are_those_of_a_loop_over_examples(name):
    model = MODELS[name]
    weights = weights_of(model)
    x, y = draw_examples(model)
    rows = example_gradients(model, weights, x, y)
    norms = np.linalg.norm(rows, axis=1)
    assert_close(model, per_example_norms(model, weights, x, y), norms)
    included = [1, 1, 0, 1, 1, 0]
    for clip_norm in (float(np.median(norms)), 0.1 * norms.min()):
        result = clip(model, weights, x, y, clip_norm, included)
        assert list(result) == list(weights)
        assert_close(model, flat(result), naive_clipped_sum(rows, clip_norm, included))


@pytest.mark.parametrize("name", parameters(MODELS, test=["cnn", "text", "not in closed form"]))
def test_without_a_clip_it_is_the_gradient_of_the_sum_up_to_rounding(name):
    model = MODELS[name]
    weights = weights_of(model)
    x, y = draw_examples(model)
    for wrap in (lambda function: function, tf.function):
        expected = flat(wrap(lambda: loss_gradient(model, weights, x, y))())
        assert_close(model, flat(wrap(lambda: clip(model, weights, x, y))()), expected)


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn", "not in closed form"])
def test_an_example_that_is_not_included_changes_no_bit(name):
    model = MODELS[name]
    weights = weights_of(model)
    x, y = (tensor.numpy() for tensor in draw_examples(model))
    included = np.array([1, 0, 1, 0, 0, 1])
    expected = clip(model, weights, x, y, 0.5, included)
    x[1], x[3], y[3], x[4, 0] = np.nan, np.inf, 1_000_000, 1e38
    for key, value in clip(model, weights, x, y, 0.5, included).items():
        np.testing.assert_array_equal(value, expected[key])
    assert_close(model, flat(clip(model, weights, x[[0, 2, 5]], y[[0, 2, 5]], 0.5)), flat(expected))
    np.testing.assert_array_equal(flat(clip(model, weights, x, y, 0.5, np.zeros(6))), 0.0)


@pytest.mark.parametrize("name", ["mlp", "cnn, strided", "not in closed form"])
def test_a_gradient_that_is_not_finite_is_dropped_but_shows_where_nothing_is_clipped(name):
    model = MODELS[name]
    weights = weights_of(model)
    x, y = (tensor.numpy() for tensor in draw_examples(model))
    x[1], x[2] = np.nan, 1e38
    expected = clip(model, weights, x, y, 0.5, [1, 0, 0, 1, 1, 1])
    for key, value in clip(model, weights, x, y, 0.5, [1, 1, 0, 1, 1, 1]).items():
        np.testing.assert_array_equal(value, expected[key])
    assert np.isfinite(flat(clip(model, weights, x, y, 0.5))).all()
    assert np.isnan(flat(clip(model, weights, x, y))).any()


@pytest.mark.parametrize("x", [1e21, 1e-25])
def test_a_norm_whose_factors_leave_the_range_of_float32_is_never_too_small(x):
    # The other class has probability exp(-50), so the gradient is about x * exp(-50): 0.27, or next to nothing.
    model = build_linear((1,), 2)
    weights = {"dense_0/kernel": tf.zeros([1, 2]), "dense_0/bias": tf.constant([50.0, 0.0])}
    x, y = tf.constant([[x]]), tf.constant([0], tf.int64)
    true_norm = np.linalg.norm(np.float64([x.numpy().item() * np.exp(-50.0), np.exp(-50.0)]))
    assert per_example_norms(model, weights, x, y)[0] >= true_norm
    assert np.linalg.norm(flat(clip(model, weights, x, y, 0.1))) <= 0.1


@pytest.mark.parametrize("name", MODELS)
def test_no_examples(name):
    model = MODELS[name]
    weights = weights_of(model)
    x, y = draw_examples(model)
    np.testing.assert_array_equal(flat(clip(model, weights, x[:0], y[:0], 1.0)), 0.0)
    np.testing.assert_array_equal(flat(clip(model, weights, x[:0], y[:0])), 0.0)
    assert per_example_norms(model, weights, x[:0], y[:0]).shape == (0,)


def test_a_model_without_closed_form_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(per_example, "_models_logged", set())
    model = MODELS["not in closed form"]
    x, y = draw_examples(model)
    with caplog.at_level(logging.INFO, logger="tff_pdp.privacy.mechanisms.per_example"):
        clip(MODELS["linear"], weights_of(MODELS["linear"]), *draw_examples(MODELS["linear"]))
        assert not caplog.records
        for _ in range(2):
            clip(model, weights_of(model), x, y)
    (record,) = (record for record in caplog.records if record.name == per_example.__name__)
    assert record.levelno == logging.WARNING
    assert "model custom" in record.getMessage()
    assert record.getMessage().endswith("layers: temperature")


def test_a_weight_that_no_layer_uses_gets_zeros_and_costs_no_closed_form(caplog):
    mlp = MODELS["mlp"]
    model = dataclasses.replace(mlp, init=lambda seed: {"unused": np.ones(2, np.float32), **mlp.init(seed)})
    x, y = draw_examples(model)
    result = clip(model, weights_of(model), x, y, 0.5)
    np.testing.assert_array_equal(result.pop("unused"), [0.0, 0.0])
    np.testing.assert_array_equal(flat(result), flat(clip(mlp, weights_of(mlp), x, y, 0.5)))
    assert not caplog.records


def test_a_layer_that_the_loss_does_not_reach_gets_zeros():
    def predict(weights, x):
        layers.dense(weights, "aside", x)
        return layers.dense(weights, "dense", x)

    shapes = {"aside/kernel": (2, 5), "aside/bias": (5,), "dense/kernel": (2, 3), "dense/bias": (3,)}
    model = build_custom(predict, shapes, (2,))
    weights = weights_of(model)
    x, y = draw_examples(model)
    expected = naive_clipped_sum(example_gradients(model, weights, x, y), 0.5, 1)
    assert_close(model, flat(clip(model, weights, x, y, 0.5)), expected)


def test_layers_that_do_not_see_one_example_in_a_row_are_refused():
    def predict(weights, x):
        rows = layers.dense(weights, "dense", tf.reshape(x, [-1, 2]))
        return tf.reduce_sum(tf.reshape(rows, [-1, 4, NUM_CLASSES]), axis=1)

    model = build_custom(predict, {"dense/kernel": (2, 3), "dense/bias": (3,)}, (4, 2))
    for num_examples in (1, 3):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"[Rr]eshape"):
            clip(model, weights_of(model), *draw_examples(model, num_examples), clip_norm=0.5)


def test_a_layer_over_positions_is_not_taken_for_one_over_examples():
    """In a batch of as many examples as there are positions, no shape gives it away."""

    def predict(weights, x):
        tokens = layers.dense(weights, "tokens", tf.one_hot(tf.cast(x, tf.int32), 5, dtype=x.dtype))
        positions = layers.dense(weights, "positions", tf.eye(4, dtype=x.dtype))
        return layers.dense(weights, "dense", tf.reduce_mean(tokens * positions, axis=1))

    sizes = {"tokens": (5, 2), "positions": (4, 2), "dense": (2, 3)}
    shapes = {f"{name}/kernel": size for name, size in sizes.items()}
    shapes |= {f"{name}/bias": size[1:] for name, size in sizes.items()}
    model = build_custom(predict, shapes, (4,), "positional")
    weights = weights_of(model)
    traced = tf.function(
        functools.partial(clip, model, weights, clip_norm=0.05),
        input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64)],
    )
    for num_examples in (3, 4):
        rng = np.random.default_rng(num_examples)
        x, y = tf.constant(rng.integers(0, 5, (num_examples, 4)), tf.float32), tf.constant(np.arange(num_examples) % 3)
        expected = naive_clipped_sum(example_gradients(model, weights, x, y), 0.05, 1)
        assert_close(model, flat(traced(x, y)), expected)


def step(model, weights, x, y):
    total = clip(model, weights, x, y, 0.5)
    return {name: weights[name] - 0.1 * tf.cast(total[name], tf.float32) for name in weights}


@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("cnn, group norm", marks=pytest.mark.all), "cnn, strided", "text"]
)
def test_in_a_loop_over_batches_of_unknown_size(name, monkeypatch):
    monkeypatch.setattr(per_example, "_models_logged", set())
    model = MODELS[name]
    start = weights_of(model)
    x, y = draw_examples(model)

    @tf.function(input_signature=[tf.TensorSpec([None, *model.input_shape]), tf.TensorSpec([None], tf.int64)])
    def descend(x, y):
        # The last batch is empty.
        return tf.while_loop(
            lambda index, _: index < 4,
            lambda index, weights: (index + 1, step(model, weights, x[2 * index :], y[2 * index :])),
            (0, start),
        )[1]

    result = descend(x, y)
    assert not per_example._models_logged
    weights = start
    for index in range(3):
        weights = step(model, weights, x[2 * index :], y[2 * index :])
    assert_close(model, flat(result), flat(weights), steps=3)


@pytest.mark.parametrize(
    "name", parameters(["linear", "mlp", "cnn", "text", "not in closed form"], test=["mlp", "not in closed form"])
)
def test_under_a_vectorised_map_over_clients(name):
    model = MODELS[name]
    clients = [weights_of(model, seed) for seed in range(2)]
    x, y = (tf.stack(tensors) for tensors in zip(*(draw_examples(model, seed=seed) for seed in range(2)), strict=True))
    included = tf.constant([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 1]], tf.float32)
    stacked = {key: tf.stack([client[key] for client in clients]) for key in clients[0]}

    @tf.function
    def clip_all(elements):
        return tf.vectorized_map(
            lambda client: clip(model, *client[:3], 0.5, client[3]),
            elements,
            # These must be fast too; there is no vectorised convolution of inputs and kernels that both differ.
            fallback_to_while_loop=name not in ("linear", "mlp"),
        )

    result = clip_all((stacked, x, y, included))
    for index, client in enumerate(clients):
        expected = clip(model, client, x[index], y[index], 0.5, included[index])
        assert_close(model, flat({key: value[index] for key, value in result.items()}), flat(expected))


def pull_of(weights, norm=1.0, seed=9):
    drawn = {name: np.random.default_rng(seed).normal(size=value.shape) for name, value in weights.items()}
    scale = norm / np.linalg.norm(flat(drawn))
    return {name: tf.constant(scale * value, tf.float32) for name, value in drawn.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_pull_is_added_to_every_gradient_before_the_clip(name):
    model = MODELS[name]
    weights = weights_of(model)
    x, y = draw_examples(model)
    gradients = example_gradients(model, weights, x, y)
    pull = pull_of(weights, norm=float(np.median(np.linalg.norm(gradients, axis=1))))
    rows = gradients + flat(pull)
    norms = np.linalg.norm(rows, axis=1)
    included = np.array([1, 1, 0, 1, 1, 0])
    for clip_norm in (float(np.median(norms)), 0.1 * norms.min(), math.inf):
        result = clip(model, weights, x, y, clip_norm, included, pull)
        assert list(result) == list(weights)
        assert_close(model, flat(result), naive_clipped_sum(rows, clip_norm, included))


def test_a_pull_by_hand():
    """Residuals 1.5 and -3, so gradients (4.5, 1.5 | 1.5) and (0, -12 | -3) of kernel and bias."""
    model = build_linear_regression((2,))
    weights = {"dense_0/kernel": tf.constant([[2.0], [-1.0]]), "dense_0/bias": tf.constant([0.5])}
    x, y = tf.constant([[3.0, 1.0], [0.0, 4.0]]), tf.constant([4.0, -0.5])
    pull = {"dense_0/kernel": tf.constant([[-0.5], [-1.5]]), "dense_0/bias": tf.constant([1.5])}
    # The sums are (4, 0 | 3), of norm 5, and (-0.5, -13.5 | -1.5), of norm 13.592...
    result = clip(model, weights, x, y, 6.0, None, pull)
    factor = 6 / math.sqrt(0.25 + 182.25 + 2.25)
    # Of exact gradients three squares, their sum and its root, a quotient, a product and a sum; nothing cancels much.
    np.testing.assert_allclose(result["dense_0/kernel"][:, 0], [4 - 0.5 * factor, -13.5 * factor], rtol=gamma(8))
    np.testing.assert_allclose(result["dense_0/bias"], [3 - 1.5 * factor], rtol=gamma(8))
    plain = clip(model, weights, x, y, pull=pull)
    np.testing.assert_array_equal(plain["dense_0/kernel"][:, 0], [3.5, -13.5])
    np.testing.assert_array_equal(plain["dense_0/bias"], [1.5])


def test_a_pull_that_cancels_most_of_a_gradient_hides_nothing_of_the_rest():
    model = build_linear_regression((2,))
    weights = {"dense_0/kernel": tf.zeros([2, 1]), "dense_0/bias": tf.zeros([1])}
    x, y = tf.constant([[1000.0, 0.0]]), tf.constant([1000.0])
    # The gradient is (-1e6, 0 | -1000); of squares and products near 1e12 float32 keeps no 1e4.
    pull = {"dense_0/kernel": tf.constant([[1e6], [1e4]]), "dense_0/bias": tf.constant([1000.0])}
    result = clip(model, weights, x, y, 0.1, None, pull)
    # As by hand, with the clip norm's own rounding. The norm errs by the allowance for 4e12 beside a square of 1e8; the
    # sum by float64's roundings of terms of 1e6, which the clip makes 10 of.
    bound = {"rtol": gamma(8) + 4e4 * 2.0**-31, "atol": 20 * gamma(4, np.float64)}
    np.testing.assert_allclose(result["dense_0/kernel"][:, 0], [0.0, 0.1], **bound)
    # What is left of a cancellation by more than 256 counts as more than it is.
    pull["dense_0/kernel"] = tf.constant([[1e6], [0.3]])
    result = clip(model, weights, x, y, 0.1, None, pull)
    expected = [0.0, 0.3 * 0.1 / (2e6 / 256)]
    np.testing.assert_allclose(result["dense_0/kernel"][:, 0], expected, **{**bound, "rtol": gamma(8 + 2)})


@pytest.mark.parametrize("name", ["linear", "cnn", "not in closed form"])
def test_with_a_pull_too_an_example_that_is_not_included_changes_no_bit(name):
    model = MODELS[name]
    weights = weights_of(model)
    pull = pull_of(weights)
    x, y = (tensor.numpy() for tensor in draw_examples(model))
    included = np.array([1, 0, 1, 0, 0, 1])
    expected = clip(model, weights, x, y, 0.5, included, pull)
    x[1], x[3], y[3] = np.nan, np.inf, 1_000_000
    for key, value in clip(model, weights, x, y, 0.5, included, pull).items():
        np.testing.assert_array_equal(value, expected[key])
    assert_close(model, flat(clip(model, weights, x[[0, 2, 5]], y[[0, 2, 5]], 0.5, None, pull)), flat(expected))
    for nobody in (np.zeros(6), [0, 1, 0, 0, 0, 0]):
        np.testing.assert_array_equal(flat(clip(model, weights, x, y, 0.5, nobody, pull)), 0.0)
    np.testing.assert_array_equal(flat(clip(model, weights, x[:0], y[:0], 0.5, None, pull)), 0.0)


def test_a_pull_that_is_not_finite_is_dropped_with_every_example():
    model = MODELS["mlp"]
    weights = weights_of(model)
    x, y = draw_examples(model)
    for value in (np.nan, np.inf, 1e38):
        pull = {**pull_of(weights), "dense_0/bias": tf.fill([5], np.float32(value))}
        np.testing.assert_array_equal(flat(clip(model, weights, x, y, 0.5, None, pull)), 0.0)
    assert np.isnan(
        flat(clip(model, weights, x, y, pull={**pull_of(weights), "dense_0/bias": tf.fill([5], np.nan)}))
    ).any()


def test_a_weight_that_no_layer_uses_is_pulled_too():
    mlp = MODELS["mlp"]
    model = dataclasses.replace(mlp, init=lambda seed: {"unused": np.ones(2, np.float32), **mlp.init(seed)})
    weights = weights_of(model)
    x, y = draw_examples(model)
    pull = pull_of(weights)
    rows = example_gradients(model, weights, x, y) + flat(pull)
    assert_close(model, flat(clip(model, weights, x, y, 0.5, None, pull)), naive_clipped_sum(rows, 0.5, 1))


@pytest.mark.parametrize("name", parameters(["linear", "mlp", "cnn", "text", "not in closed form"], test=["cnn"]))
def test_a_pull_to_an_anchor_in_a_loop_under_a_vectorised_map_over_clients(name):
    """As DP-SGD runs: every step pulls to where the client started, by the distance it has come."""
    model = MODELS[name]
    starts = [weights_of(model, seed) for seed in range(2)]
    x, y = (tf.stack(tensors) for tensors in zip(*(draw_examples(model, seed=seed) for seed in range(2)), strict=True))
    stacked = {key: tf.stack([start[key] for start in starts]) for key in starts[0]}

    def pulled_step(weights, anchor, x, y):
        pull = {key: 2.0 * (weights[key] - anchor[key]) for key in weights}
        total = clip(model, weights, x, y, 0.5, None, pull)
        return {key: weights[key] - 0.1 * tf.cast(total[key], tf.float32) for key in weights}

    @tf.function
    def descend(elements):
        def of_client(client):
            anchor, own_x, own_y = client
            return tf.while_loop(
                lambda index, _: index < 3,
                lambda index, weights: (
                    index + 1,
                    pulled_step(weights, anchor, own_x[2 * index : 2 * index + 2], own_y[2 * index : 2 * index + 2]),
                ),
                (0, anchor),
            )[1]

        # Without convolutions nothing may fall back, as above.
        return tf.vectorized_map(of_client, elements, fallback_to_while_loop=name not in ("linear", "mlp"))

    result = descend((stacked, x, y))
    for index, anchor in enumerate(starts):
        weights = anchor
        for first in (0, 2, 4):
            gradients = example_gradients(model, weights, x[index, first : first + 2], y[index, first : first + 2])
            rows = gradients + 2.0 * (flat(weights) - flat(anchor))
            moved = flat(weights) - 0.1 * naive_clipped_sum(rows, 0.5, 1)
            parts = np.split(moved, np.cumsum([math.prod(value.shape) for value in weights.values()])[:-1])
            weights = {
                key: tf.constant(part.reshape(value.shape), tf.float32)
                for (key, value), part in zip(weights.items(), parts, strict=True)
            }
        assert_close(model, flat({key: value[index] for key, value in result.items()}), flat(weights), steps=3)


MLP = MODELS["mlp"]


@tf.function(
    input_signature=[
        tf.TensorSpec([None, 2, 2, 1]),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([]),
        tf.TensorSpec([None]),
    ]
)
def clipped_sum_of_mlp(x, y, clip_norm, included):
    return clipped_sum(MLP, weights_of(MLP), x, y, clip_norm=clip_norm, included=included)


@settings(max_examples=40, deadline=None)
@given(
    included=st.lists(st.booleans(), min_size=1, max_size=8),
    clip_norm=st.floats(1e-3, 1e3),
    exponent=st.integers(-6, 6),
    seed=st.integers(0, 1000),
)
def test_no_example_moves_the_sum_by_more_than_the_clip(included, clip_norm, exponent, seed):
    x, y = draw_examples(MLP, len(included), seed)
    x = x * 10.0**exponent
    included = np.array(included, np.float32)
    total = flat(clipped_sum_of_mlp(x, y, clip_norm, included))
    assert total.dtype == np.float64
    largest = np.float64(np.float32(clip_norm)) * (1 + 2 * sum_error(len(included)))
    for index in range(len(included)):
        other = included.copy()
        other[index] = 1 - included[index]
        difference = flat(clipped_sum_of_mlp(x, y, clip_norm, other)) - total
        # The difference and its length are rounded here, in float64.
        allowance = gamma(MLP.num_parameters() + 4, np.float64) * np.linalg.norm(np.abs(total) + np.abs(difference))
        assert np.linalg.norm(difference) <= largest + allowance


@pytest.mark.parametrize("name", ["mlp", "cnn, strided"])
def test_what_the_sum_may_lose_is_taken_from_the_clip(name):
    model = MODELS[name]
    weights = weights_of(model)
    x, y = draw_examples(model)
    included = tf.ones([NUM_EXAMPLES])
    most = 3e4
    gradients, norms = per_example._gradients_and_norms(model, weights, x, y, None)
    positions = max(form.positions for form in gradients.values())
    left = 1 - 2 * sum_error(most, positions)
    assert 0 < left < 1
    for clip_norm in (float(np.median(norms)), math.inf):
        given = tf.constant(clip_norm, tf.float64)
        found = clipped_sum(model, weights, x, y, clip_norm=given, included=included, most_examples=tf.constant(most))
        shorter = clipped_sum(model, weights, x, y, clip_norm=given * left, included=included)
        for one, other in zip(found.values(), shorter.values(), strict=True):
            np.testing.assert_allclose(one, other, rtol=gamma(4, np.float64))
    # With more examples than a float64 sum is good for nothing is left, rather than a sum that tells.
    nothing = clipped_sum(model, weights, x, y, clip_norm=tf.constant(1.0), included=included, most_examples=1e9)
    assert not any(np.any(value) for value in nothing.values())


def test_sums_have_as_many_terms_of_an_example_as_forms_say():
    a, g = tf.ones([2, 5, 30]), tf.ones([2, 5, 40])
    assert dense_kernel(a, g).positions == 5
    assert dense_kernel(a[:, 0], g[:, 0]).positions == 1
    # Cheaper to hold.
    assert dense_kernel(a[..., :2], g[..., :2]).positions == 1


def exact_squares(form):
    """Each example's squared norm by one weight, of real numbers."""
    squares = []
    for row in range(NUM_EXAMPLES):
        if isinstance(form, Held):
            values = [Fraction(float(value)) for part in form.values for value in np.ravel(part[row])]
            squares.append(sum(value * value for value in values))
            continue
        a, g = (np.atleast_2d(tensor[row].numpy()).tolist() for tensor in (form.inputs, form.cotangent))
        a, g = ([[Fraction(value) for value in position] for position in rows] for rows in (a, g))
        grams = [[[sum(map(operator.mul, t, u)) for u in rows] for t in rows] for rows in (a, g)]
        squares.append(sum(map(operator.mul, itertools.chain(*grams[0]), itertools.chain(*grams[1]))))
    return squares


@pytest.mark.parametrize("name", ["mlp", "cnn, strided", "cnn, group norm", "text", "not in closed form"])
def test_no_part_is_longer_than_the_clip_by_any_rounding(name):
    """In exact arithmetic, of the factors and of what they multiply as they are."""
    model = MODELS[name]
    weights = weights_of(model)
    closest = 0.0
    for seed in range(amount(test=3, all=30)):
        x, y = draw_examples(model, seed=seed)
        if name != "text":
            x = x * tf.constant(10.0 ** np.random.default_rng(seed).uniform(-12, 12), tf.float32)
        gradients, norms = per_example._gradients_and_norms(model, weights, x, y, None)
        squares = [sum(of_example) for of_example in zip(*map(exact_squares, gradients.values()), strict=True)]
        for share in (1e-3, 0.5, 1.0, 1.0 + 2.0**-25, 2.0):
            clip_norm = np.float32(share * np.median(norms))
            factors = per_example._clip_factors(norms, tf.constant(clip_norm, tf.float64)).numpy()
            for factor, square in zip(factors, squares, strict=True):
                part = Fraction(float(factor)) ** 2 * square
                assert part <= Fraction(float(clip_norm)) ** 2
                closest = max(closest, float(part / Fraction(float(clip_norm)) ** 2))
    # Nor are they much shorter than they might be.
    assert closest > 1 - 1e-4


def test_the_error_of_a_sum_stays_far_below_the_clip():
    for num_examples, positions in ((16384, 1), (4096, 16), (2048, 64)):
        assert sum_error(num_examples, positions) < 2.0**-16
    assert sum_error(0) == 0.0
    assert sum_error(100) < sum_error(101) < sum_error(101, 2)


@pytest.mark.parametrize("num_examples", [1, 15, 16, 17, 40])
def test_batches_of_other_sizes_than_whole_blocks(num_examples):
    model = MODELS["mlp"]
    weights = weights_of(model)
    x, y = draw_examples(model, num_examples)
    assert per_example_norms(model, weights, x, y).shape == (num_examples,)
    rows = example_gradients(model, weights, x, y)
    assert_close(model, flat(clip(model, weights, x, y, 0.5)), naive_clipped_sum(rows, 0.5, 1))
