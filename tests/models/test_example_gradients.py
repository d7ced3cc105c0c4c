import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.models import example_gradients
from tff_pdp.models.example_gradients import CANCELLATION, Held, OuterProducts, Repeated, TableRows, embedding_table


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_two_forms_are_chosen_by_cost():
    assert example_gradients._gram_is_cheaper(3, 16, 17)
    assert not example_gradients._gram_is_cheaper(6, 2, 3)
    assert example_gradients._gram_is_cheaper(6, 36, 24)
    assert not example_gradients._gram_is_cheaper(None, 1000, 1000)
    # Nor beyond what its allowance is for.
    assert example_gradients._gram_is_cheaper(1023, 2**16, 2**16)
    assert not example_gradients._gram_is_cheaper(1024, 2**16, 2**16)


def fractions(values):
    return [Fraction(float(value)) for value in np.ravel(values)]


def gradients_of(form):
    """Each example's gradient as Fractions, flat, and a bound on the magnitude of it, of real numbers."""
    if isinstance(form, Held):
        rows = [fractions(np.concatenate([np.ravel(part[i]) for part in form.values])) for i in range(BATCH)]
        return rows, [norm(row) for row in rows]
    pull = fractions(np.zeros(form.shape) if form.pull is None else form.pull)
    rows, magnitudes = [], []
    for a, g in zip(form.inputs.numpy(), form.cotangent.numpy(), strict=True):
        total, magnitude = list(pull), Fraction(0) if form.pull is None else length(pull)
        for a_t, g_t in zip(np.atleast_2d(a), np.atleast_2d(g), strict=True):
            products = [left * right for left in fractions(a_t) for right in fractions(g_t)]
            total = [old + new for old, new in zip(total, products, strict=True)]
            magnitude += length(fractions(a_t)) * length(fractions(g_t))
        rows.append(total)
        magnitudes.append(magnitude)
    return rows, magnitudes


def squared(values):
    return sum((value * value for value in values), Fraction(0))


def norm(values):
    return root(squared(values))


def length(values):
    """The norm with what is added for numbers that may count as zero."""
    return root(squared(values) + len(values) * Fraction(2) ** -152)


def root(square):
    """The square root, rounded up by no more than 2**-50 of it."""
    if not square:
        return Fraction(0)
    # Roots of integers are exact; the shift keeps 120 bits of the square.
    shift = 120 - (square.numerator.bit_length() - square.denominator.bit_length())
    shift += shift % 2
    scaled = square * Fraction(2) ** shift
    return Fraction(_root_rounded_up(-(-scaled.numerator // scaled.denominator))) / Fraction(2) ** (shift // 2)


def _root_rounded_up(value):
    root = math.isqrt(value)
    return root if root * root == value else root + 1


BATCH = 3


def adversarial(rng, *shape):
    """Values whose magnitudes an example draws anew, from float32's smallest to near its largest; some are zero."""
    scale = 10.0 ** rng.uniform(-30, 33, (shape[0], *[1] * (len(shape) - 1)))
    spread = 10.0 ** rng.uniform(-8, 0, shape)
    return np.float32(rng.normal(size=shape) * scale * spread * (rng.random(shape) > 0.1))


def cancelling(rng, a, g):
    """Makes the last position undo the others up to some rounding, where there are several."""
    if a.ndim == 3:
        a[:, -1], g[:, -1] = a[:, 0], -g[:, :-1].sum(axis=1, dtype=np.float64)
        a[:, 1:-1] = a[:, :1]
        g[:, -1] *= 1 + rng.choice([0, 1e-7, 1e-3], (len(g), 1))
    return a, g


def form_of(kind, rng):
    draw = lambda *shape: adversarial(rng, BATCH, *shape)  # noqa: E731
    match kind:
        case "one position":
            return OuterProducts(tf.constant(draw(4)), tf.constant(draw(3)), [4, 3])
        case "one position, pulled":
            a, g = draw(4), draw(3)
            g = np.float32(g / np.maximum(np.abs(a).max(axis=1, keepdims=True), 1))
            pull = -np.float32(np.outer(a[0], g[0])) if np.isfinite(np.outer(a[0], g[0])).all() else np.ones((4, 3))
            return OuterProducts(tf.constant(a), tf.constant(g), [4, 3], tf.constant(pull, tf.float32))
        case "Gram":
            a, g = cancelling(rng, draw(4, 2), draw(4, 3))
            return OuterProducts(tf.constant(a), tf.constant(g), [2, 3])
        case "Gram, pulled":
            a, g = cancelling(rng, draw(3, 2), draw(3, 2))
            return OuterProducts(tf.constant(a), tf.constant(g), [2, 2], tf.constant(adversarial(rng, 2, 2)))
        case "held":
            return Held((tf.constant(draw(2, 3)), tf.constant(draw(2, 3))), [2, 2, 3])
        case "held, long rows":
            return Held((tf.constant(draw(1100)),), [1100])


KINDS = [
    "one position",
    "one position, pulled",
    "Gram",
    "Gram, pulled",
    "held",
    "held, long rows",
]


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_sums_are_within_their_bounds_in_exact_arithmetic(kind):
    largest_ratio = Fraction(0)
    for seed in range(4 if kind == "held, long rows" else 40):
        rng = np.random.default_rng(seed)
        form = form_of(kind, rng)
        rows, magnitudes = gradients_of(form)
        squares = form.squared_norms().numpy()
        factors = np.array([0.0, *rng.uniform(0, 1, BATCH - 1) * 10.0 ** rng.uniform(-40, 0, BATCH - 1)])
        are_moderate = all(np.abs(tensor).max(axis=tensor.ndim - 1).min() > 1e-15 for tensor in tensors_of(form))
        for index, (row, magnitude, square) in enumerate(zip(rows, magnitudes, squares, strict=True)):
            if np.isinf(square):
                # Of the gradient, or of one of the two that it is the product of.
                longest = max([norm(row), *(norm(fractions(tensor[index])) for tensor in tensors_of(form))])
                assert longest > 1e18, "only squares that float32 cannot hold may be infinite"
                continue
            exact = squared(row)
            least = max(exact, magnitude * magnitude / Fraction(CANCELLATION) ** 2)
            assert Fraction(square) >= least * (1 - Fraction(2) ** -25)
            # Nor much too large: where nothing cancels, by float32's roundings of up to 1024 squares at most.
            if magnitude * magnitude < 1e4 * exact and are_moderate:
                assert Fraction(square) <= exact * (1 + Fraction(2) ** -12)
        found = fractions(form.weighted_sum(tf.constant(factors)).numpy())
        weights = fractions(factors)
        exact = [sum(w * row[k] for w, row in zip(weights, rows, strict=True)) for k in range(len(rows[0]))]
        error = norm([value - expected for value, expected in zip(found, exact, strict=True)])
        positions = form.inputs.shape[1] if kind.startswith("Gram") else 1
        terms = sum(w * magnitude for w, magnitude in zip(weights, magnitudes, strict=True))
        bound = Fraction(2) ** -53 * (BATCH * positions + 20) * terms
        assert error <= bound
        if terms:
            largest_ratio = max(largest_ratio, error / bound)
    # The bound is no empty one.
    assert largest_ratio > 0.001


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_example_that_is_not_finite_has_no_finite_norm_and_adds_nothing_by_a_factor_of_zero(kind, value):
    form = form_of(kind, np.random.default_rng(1))
    factors = tf.constant([0.5, 0.0, 0.25], tf.float64)
    spoilt = []
    for tensor in tensors_of(form):
        array = tensor.numpy()
        array[1, ..., 0] = value
        spoilt.append(tf.constant(array))
    expected, squares = form.weighted_sum(factors), form.squared_norms().numpy()
    for which in range(len(spoilt)):
        parts = [*tensors_of(form)[:which], spoilt[which], *tensors_of(form)[which + 1 :]]
        other = with_tensors(form, parts)
        np.testing.assert_array_equal(other.weighted_sum(factors), expected)
        found = other.squared_norms().numpy()
        assert not np.isfinite(found[1])
        np.testing.assert_array_equal(found[[0, 2]], squares[[0, 2]])


def tensors_of(form):
    match form:
        case Held():
            return list(form.values)
        case OuterProducts():
            return [form.inputs, form.cotangent]


def with_tensors(form, parts):
    match form:
        case Held():
            return Held(tuple(parts), form.shape)
        case OuterProducts():
            return OuterProducts(*parts, form.shape, form.pull)


def test_a_gram_form_sees_past_cancellation_up_to_a_limit():
    # Two positions whose products nearly cancel: 1000 * 1000 against -1000 * 990; the rest is small.
    a = tf.constant([[[1000.0, 0.0], [1000.0, 1.0]]])
    g = tf.constant([[[1000.0], [-990.0]]])
    (exact,) = [squared(row) for row in gradients_of_one(a, g)]
    form = OuterProducts(a, g, [2, 1])
    # The allowance is relative to (1000 * 1000 + 1000 * 990)^2.
    assert float(exact) <= form.squared_norms()[0] <= float(exact) + 2.0**-30 * 4e12
    # By more than the limit: it counts as larger than it is, in proportion to its terms.
    g = tf.constant([[[1000.0], [-999.999]]])
    floor = ((1000.0 * 1000 + np.hypot(1000, 1) * float(g[0, 1, 0]) * -1) / CANCELLATION) ** 2
    np.testing.assert_allclose(OuterProducts(a, g, [2, 1]).squared_norms(), [floor])


def gradients_of_one(a, g):
    return [
        [
            sum(
                Fraction(float(left)) * Fraction(float(right))
                for left, right in zip(a[0, :, i], g[0, :, o], strict=True)
            )
            for i in range(a.shape[2])
            for o in range(g.shape[2])
        ]
    ]


def test_the_gram_form_of_a_zero_gradient_is_never_negative():
    # The same inputs at three positions, whose cotangents sum to zero.
    a = tf.repeat(tf.constant(normal(1000, 1, 2)), 3, axis=1)
    g = tf.constant(np.random.default_rng(1).integers(-9, 10, (1000, 2, 3)), tf.float32)
    g = tf.concat([g, -tf.reduce_sum(g, axis=1, keepdims=True)], axis=1)
    assert (OuterProducts(a, g, [2, 3]).squared_norms().numpy() >= 0).all()


def test_a_repeated_pull_is_every_examples_gradient():
    form = Repeated(tf.constant([3.0, -4.0]))
    assert form.squared_norms() == 25.0
    np.testing.assert_array_equal(form.weighted_sum(tf.constant([0.5, 0.25], tf.float64)), [2.25, -3.0])
    nothing = Repeated(tf.constant([np.nan, np.inf])).weighted_sum(tf.zeros([2], tf.float64))
    np.testing.assert_array_equal(nothing, [0.0, 0.0])


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(
    ("window", "strides"), [((4, 3), 2), ((4, 2), 2), ((3, 6), 3), ((2, 5), 3), ((1, 1), 2), ((3, 3), 1)]
)
def test_gradients_of_a_convolution_by_hand(window, strides, padding):
    """Sums over positions, one after another, of small integers: exact in float32."""
    rng = np.random.default_rng(0)
    x, pull = rng.integers(-4, 5, (2, 9, 8, 2)), rng.integers(-4, 5, (*window, 2, 3))
    out = [
        -(-size // strides) if padding == "SAME" else (size - side) // strides + 1
        for size, side in zip((9, 8), window, strict=True)
    ]
    g = rng.integers(-4, 5, (2, *out, 3))
    before = [0, 0]
    if padding == "SAME":
        before = [
            max((count - 1) * strides + side - size, 0) // 2
            for count, side, size in zip(out, window, (9, 8), strict=True)
        ]
    expected = np.broadcast_to(pull, (2, *window, 2, 3)).copy()
    for i, j, row, column in np.ndindex(*window, *out):
        at = row * strides + i - before[0], column * strides + j - before[1]
        if 0 <= at[0] < 9 and 0 <= at[1] < 8:
            expected[:, i, j] += x[:, *at, :, np.newaxis] * g[:, row, column, np.newaxis, :]
    found = example_gradients.conv2d_kernel(
        tf.constant(x, tf.float32), tf.constant(g, tf.float32), window, strides, padding, tf.constant(pull, tf.float32)
    )
    for example in range(2):
        one = found.weighted_sum(tf.one_hot(example, 2, dtype=tf.float64))
        np.testing.assert_array_equal(one, expected[example])


@pytest.mark.parametrize("pulled", [False, True])
def test_rows_of_a_table_are_outer_products_with_one_hot_inputs(pulled):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, (BATCH, 6)).astype(np.int32)
    # Small integers: sums of them are exact.
    g = tf.constant(rng.integers(-4, 5, (BATCH, 6, 3)), tf.float32)
    pull = tf.constant(rng.integers(-4, 5, (5, 3)), tf.float32) if pulled else None
    found = embedding_table(tf.constant(ids), g, 5, pull)
    assert isinstance(found, TableRows) and found.positions == 6
    one_hot = OuterProducts(tf.one_hot(ids, 5), g, [5, 3], pull)
    factors = tf.constant([0.5, 0.0, 0.25], tf.float64)
    np.testing.assert_array_equal(found.weighted_sum(factors), one_hot.weighted_sum(factors))
    exact = np.zeros((BATCH, 5, 3)) + (0 if pull is None else pull.numpy())
    for example, position in np.ndindex(BATCH, 6):
        exact[example, ids[example, position]] += g[example, position]
    squares = np.square(exact).sum(axis=(1, 2))
    # Integers that float64 holds, but for the allowance, which is below 2**-30 of (6 sqrt(48) + |pull|)^2 < 10000.
    np.testing.assert_allclose(found.squared_norms(), squares, atol=1e4 * 2.0**-30)
    assert (found.squared_norms().numpy() >= squares).all()
    np.testing.assert_array_equal(found.weighted_sum(factors), np.tensordot([0.5, 0.0, 0.25], exact, 1))


def test_one_id_of_each_example_and_long_texts():
    g = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    found = embedding_table(tf.constant([2, 0]), g, 3)
    np.testing.assert_array_equal(found.weighted_sum(tf.constant([1.0, 2.0], tf.float64)), [[6, 8], [0, 0], [1, 2]])
    ids = tf.constant(np.arange(2 * 1500).reshape(2, 1500) % 3, tf.int32)
    long = embedding_table(ids, tf.ones([2, 1500, 2]), 3)
    assert isinstance(long, Held)
    # 500 positions for each id.
    np.testing.assert_array_equal(long.weighted_sum(tf.constant([1.0, 1.0], tf.float64)), np.full((3, 2), 1000.0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_finite_norm_and_adds_nothing_by_a_factor_of_zero(value):
    ids = tf.constant([[0, 1], [1, 2], [2, 2]])
    g = np.ones((BATCH, 2, 2), np.float32)
    factors = tf.constant([0.5, 0.0, 0.25], tf.float64)
    expected = embedding_table(ids, tf.constant(g), 3)
    g[1, 0, 0] = value
    found = embedding_table(ids, tf.constant(g), 3)
    np.testing.assert_array_equal(found.weighted_sum(factors), expected.weighted_sum(factors))
    assert np.isfinite(found.squared_norms().numpy()).tolist() == [True, False, True]
