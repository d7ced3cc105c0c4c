"""What one example contributes to a clipped sum is the same bits, whoever else is in the batch and wherever it stands.

The sensitivity of `clipped_sum` rests on it: with other bits, an example that comes or goes would move the parts of the
others, too. It is a property of TensorFlow's kernels on a processor, so it is looked at and not proved.
"""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.tiers import amount
from tff_pdp import _tff
from tff_pdp.models import layers
from tff_pdp.models.base import Model
from tff_pdp.models.convolutional import build_cnn, build_lenet
from tff_pdp.models.dense import build_linear, build_mlp
from tff_pdp.models.example_gradients import Held, OuterProducts
from tff_pdp.models.resnet import build_resnet20
from tff_pdp.privacy.mechanisms import per_example

CLIP_NORM = 0.5
LARGEST_BATCH = 130
NUM_CLASSES = 10


def build(shapes, input_shape, predict):
    def init(seed):
        rng = np.random.default_rng(seed)
        return {
            name: np.float32(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))) for name, shape in shapes.items()
        }

    return Model(name="layer", input_shape=input_shape, num_classes=NUM_CLASSES, init=init, predict=predict, head=())


def dense_over_positions(positions, size_in):
    def predict(weights, x):
        return tf.reduce_mean(tf.nn.tanh(layers.dense(weights, "a", x)), axis=1)[:, :NUM_CLASSES]

    return build({"a/kernel": (size_in, 40), "a/bias": (40,)}, (positions, size_in), predict)


def conv(height, size_in, size_out, strides=1, padding="VALID"):
    def predict(weights, x):
        outputs = tf.nn.tanh(layers.conv2d(weights, "a", x, strides, padding))
        return tf.reduce_mean(outputs, axis=[1, 2])[:, :NUM_CLASSES]

    return build({"a/kernel": (3, 3, size_in, size_out), "a/bias": (size_out,)}, (height, height, size_in), predict)


def predict_normed(weights, x):
    normed = layers.group_norm(weights, "a", x, groups=4)
    return tf.reduce_max(tf.nn.tanh(normed), axis=[1, 2])[:, :NUM_CLASSES]


def predict_by_name(weights, x):
    return tf.nn.tanh(x @ weights["kernel"])


# The form that the kernel's gradients are held in, where there is a layer for itself, and the model.
LAYERS = {
    "dense": (OuterProducts, build_linear((784,), NUM_CLASSES)),
    "dense over positions, Gram form": (OuterProducts, dense_over_positions(4, 40)),
    "dense over positions, direct form": (Held, dense_over_positions(20, 12)),
    "conv VALID": (Held, conv(8, 3, 16)),
    "conv SAME": (Held, conv(8, 4, 16, padding="SAME")),
    "conv VALID, strides 2": (Held, conv(9, 3, 16, strides=2)),
    "conv SAME, strides 2": (Held, conv(9, 3, 16, strides=2, padding="SAME")),
    "conv SAME, strides 2, by squares": (Held, conv(8, 4, 16, strides=2, padding="SAME")),
    "conv, Gram form": (OuterProducts, conv(3, 8, 32, padding="SAME")),
    "group norm": (Held, build({"a/scale": (16,), "a/bias": (16,)}, (6, 6, 16), predict_normed)),
    "not in closed form": (Held, build({"kernel": (9, NUM_CLASSES)}, (9,), predict_by_name)),
}
MODELS = {
    "mlp": (OuterProducts, build_mlp((784,), NUM_CLASSES, (200,))),
    "cnn": (Held, build_cnn((12, 12, 1), NUM_CLASSES, (8, 16), 3, 32)),
    "lenet": (Held, build_lenet((16, 16, 1), NUM_CLASSES)),
    "resnet": (Held, build_resnet20((8, 8, 3), NUM_CLASSES)),
}
CASES = {**LAYERS, **MODELS}
# Kernels' gradients that are sums of products over so many positions, and never held. Float64 adds the products up with
# those of all rows, in an order that depends on their number; `sum_error` charges for what any order rounds.
POSITIONS = {"dense over positions, Gram form": 4, "conv, Gram form": 9}


def contributions(model, form, weights, x, y, row):
    """All that a part is made of, `[batch, ...]`, and the part of one row."""
    x, y = per_example._in_blocks(x), per_example._in_blocks(y)
    gradients, norms = per_example._gradients_and_norms(model, weights, x, y, None)
    first = next(iter(gradients.values()))
    assert isinstance(first, form)
    factors = per_example._clip_factors(norms, tf.constant(CLIP_NORM, tf.float64))
    found = {"norm": norms, "factor": factors}
    for name, of_weight in gradients.items():
        match of_weight:
            case OuterProducts():
                found |= {f"inputs of {name}": of_weight.inputs, f"cotangents of {name}": of_weight.cotangent}
            case Held():
                found |= {f"gradient {i} of {name}": value for i, value in enumerate(of_weight.values)}
    one = factors * tf.one_hot(row, tf.shape(factors)[0], dtype=tf.float64)
    return found, {name: of_weight.weighted_sum(one) for name, of_weight in gradients.items()}


def weights_of(model, seed=0):
    return collections.OrderedDict((name, tf.constant(value)) for name, value in model.init(seed).items())


def signature(model):
    return [
        tf.TensorSpec([None, *model.input_shape]),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([], tf.int32),
    ]


@functools.cache
def traced(case):
    form, model = CASES[case]
    return tf.function(
        functools.partial(contributions, model, form, weights_of(model)), input_signature=signature(model)
    )


def draw_rows(model, rng, num_rows):
    # Some are far from others in size, and some of no size at all.
    scale = 10.0 ** rng.choice([-20, -3, 0, 0, 0, 2], (num_rows, *[1] * len(model.input_shape)))
    x = np.float32(rng.normal(size=(num_rows, *model.input_shape)) * scale)
    return x, rng.integers(0, NUM_CLASSES, num_rows)


def neighbours(model, rng, sizes=None):
    """A batch, one that differs from it by one row, and for each row of both its places in the two."""
    size = int(rng.integers(2, LARGEST_BATCH) if sizes is None else rng.choice(sizes))
    x, y = draw_rows(model, rng, size + 1)
    kind = rng.choice(["added", "removed", "replaced"])
    place = int(rng.integers(0, size + 1))
    others = np.delete(np.arange(size + 1), place)
    if kind == "replaced":
        new_x, new_y = draw_rows(model, rng, 1)
        other_x, other_y = x.copy(), y.copy()
        other_x[place], other_y[place] = new_x[0], new_y[0]
        return (x, y), (other_x, other_y), (others, others)
    with_it, without_it = (x, y), (x[others], y[others])
    places = others, np.arange(size)
    if kind == "added":
        return without_it, with_it, places[::-1]
    return with_it, without_it, places


def differing(one, other, places):
    """Names of what is not to the bit the same for rows that both have."""
    names = []
    for name in one:
        left, right = (np.asarray(found[name])[own] for found, own in zip((one, other), places, strict=True))
        if left.tobytes() != right.tobytes():
            names.append(name)
    return names


def assert_same_parts(case, parts, others, message):
    """Compares parts of one row: to the bit, but for the order in which float64 adds up products that nobody holds."""
    for name, part in parts.items():
        if case in POSITIONS and name.endswith("/kernel"):
            bound = 2 * per_example.sum_error(1, POSITIONS[case]) * CLIP_NORM
            assert np.linalg.norm(np.ravel(part) - np.ravel(others[name])) <= bound, f"{name}, {message}"
        else:
            # Sums with zeros, of which there may be negative ones.
            np.testing.assert_array_equal(part, others[name], err_msg=f"{name}, {message}")


def assert_independent(case, compute, seeds, sizes=None):
    model = CASES[case][1]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        one, other, places = neighbours(model, rng, sizes)
        which = int(rng.integers(0, len(places[0])))
        found, part = compute(*one, np.int32(places[0][which]))
        other_found, other_part = compute(*other, np.int32(places[1][which]))
        sizes_of_both = (len(one[0]), len(other[0]))
        assert not differing(found, other_found, places), f"seed {seed}, of {sizes_of_both} rows"
        assert_same_parts(case, part, other_part, f"seed {seed}")


SMALL, LARGE = amount(test=40, all=1000), amount(test=4, all=100)


@pytest.mark.parametrize("case", CASES)
def test_a_row_keeps_its_bits_when_another_comes_goes_or_changes(case):
    trials = LARGE if case in MODELS and case != "mlp" else SMALL
    assert_independent(case, traced(case), range(trials))


@pytest.mark.parametrize("case", CASES)
def test_a_row_keeps_its_bits_in_batches_of_every_size_and_at_every_place(case):
    compute, model = traced(case), CASES[case][1]
    rng = np.random.default_rng(1)
    x, y = draw_rows(model, rng, LARGEST_BATCH)
    alone, part = compute(x[:1], y[:1], np.int32(0))
    every = amount(test=43 if case == "resnet" else 13, all=5 if case == "resnet" else 1)
    for size in range(1, LARGEST_BATCH + 1, every):
        place = int(rng.integers(0, size))
        order = np.roll(np.arange(size), place)
        found, own = compute(x[order], y[order], np.int32(place))
        assert not differing(alone, found, ([0], [place])), f"at {place} of {size}"
        assert_same_parts(case, own, part, f"at {place} of {size}")


@pytest.mark.parametrize("case", ["dense", "dense over positions, direct form", "conv SAME", "mlp"])
def test_traced_or_not_it_keeps_its_bits(case):
    form, model = CASES[case]

    def compute(*example_rows):
        return contributions(model, form, weights_of(model), *map(tf.convert_to_tensor, example_rows))

    assert_independent(case, compute, range(3))


# A vectorised map has no convolutions over inputs and kernels that both differ: it goes through clients one by one.
@pytest.mark.parametrize("case", [case for case in CASES if case != "resnet"])
def test_a_row_keeps_its_bits_in_a_stack_of_clients(case):
    form, model = CASES[case]
    clients = [weights_of(model, seed) for seed in range(3)]
    stacked = {name: tf.stack([client[name] for client in clients]) for name in clients[0]}

    @tf.function(input_signature=[tf.TensorSpec([3, *spec.shape], spec.dtype) for spec in signature(model)])
    def of_all(x, y, row):
        return tf.vectorized_map(lambda own: contributions(model, form, *own), (stacked, x, y, row))

    for seed in range(amount(test=5, all=100)):
        rng = np.random.default_rng(seed)
        client = int(rng.integers(0, 3))
        one, other, places = neighbours(model, rng)
        which = int(rng.integers(0, len(places[0])))
        results = []
        for (x, y), own in zip((one, other), places, strict=True):
            # The others have other rows in the two stacks, which are as long as the client's.
            rows = [draw_rows(model, rng, len(y)) for _ in range(3)]
            rows[client] = (x, y)
            places_of_all = np.full(3, own[which], np.int32)
            found, part = of_all(np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]), places_of_all)
            results.append([{name: value[client] for name, value in values.items()} for values in (found, part)])
        assert not differing(results[0][0], results[1][0], places), f"seed {seed}"
        assert_same_parts(case, results[0][1], results[1][1], f"seed {seed}")


@pytest.mark.parametrize(
    "case",
    [
        "dense",
        "dense over positions, Gram form",
        "dense over positions, direct form",
        "conv SAME",
        "conv, Gram form",
        "group norm",
        "not in closed form",
        "mlp",
    ],
)
def test_a_row_keeps_its_bits_in_the_native_worker(case, native_engine):
    form, model = CASES[case]

    @_tff.tensorflow_computation(
        *(_tff.TensorType(spec.dtype.as_numpy_dtype, spec.shape.as_list()) for spec in signature(model))
    )
    def compute(x, y, row):
        return contributions(model, form, weights_of(model), x, y, row)

    def call(x, y, row):
        found, part = compute(x, y, row)
        return dict(found), dict(part)

    with native_engine.install():
        assert_independent(case, call, range(amount(test=4, all=40)))
