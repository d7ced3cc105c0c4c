import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import ELEMENTARY, gamma
from tff_pdp.models import layers
from tff_pdp.models.layers import RecordingWeights

BATCH = 4


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_dense_by_hand_and_over_positions():
    weights = {"a/kernel": np.array([[1.0], [-2.0]], np.float32), "a/bias": np.array([0.5], np.float32)}
    np.testing.assert_array_equal(layers.dense(weights, "a", tf.constant([[3.0, 1.0], [0.0, 1.0]])), [[1.5], [-1.5]])
    over_positions = layers.dense(weights, "a", tf.constant([[[3.0, 1.0], [0.0, 1.0]]]))
    np.testing.assert_array_equal(over_positions, [[[1.5], [-1.5]]])


def test_conv2d_by_hand():
    weights = {"a/kernel": np.ones([2, 2, 1, 1], np.float32), "a/bias": np.array([1.0], np.float32)}
    x = tf.reshape(tf.range(9.0), [1, 3, 3, 1])
    np.testing.assert_array_equal(layers.conv2d(weights, "a", x)[0, :, :, 0], [[9.0, 13.0], [21.0, 25.0]])
    # Of an even window the padding goes after: the last sums are of the pixels 2, 5 (right), 6, 7 (below) and 8.
    padded = layers.conv2d(weights, "a", x, strides=2, padding="SAME")
    np.testing.assert_array_equal(padded[0, :, :, 0], [[9.0, 8.0], [14.0, 9.0]])


@pytest.mark.parametrize("shape", [(3, 5, 2, 4), (3, 4)])
def test_group_norm_normalises_each_example_and_group(shape):
    x = normal(*shape) * 3 + 1
    weights = {"a/scale": normal(4, seed=1), "a/bias": normal(4, seed=2)}
    groups = x.astype(np.float64).reshape(shape[0], -1, 2, 2)
    centred = groups - groups.mean(axis=(1, 3), keepdims=True)
    normalised = centred / np.sqrt(groups.var(axis=(1, 3), keepdims=True) + 1e-5)
    expected = normalised.reshape(shape) * weights["a/scale"] + weights["a/bias"]
    # A mean, a variance of what is centred by it, its root's reciprocal; of numbers up to the largest.
    bound = gamma(2 * (groups[0, :, 0].size + 2) + ELEMENTARY + 4) * np.abs(expected).max()
    np.testing.assert_allclose(layers.group_norm(weights, "a", tf.constant(x), groups=2), expected, atol=bound)


def conv(strides, padding):
    return lambda weights, name, x: layers.conv2d(weights, name, x, strides, padding)


# Layer, weights, x: with both forms of dense and convolution, the Gram one where there are few positions.
LAYERS = {
    "dense": (layers.dense, {"kernel": (5, 3), "bias": (3,)}, normal(BATCH, 5)),
    "dense, Gram form": (layers.dense, {"kernel": (16, 17), "bias": (17,)}, normal(BATCH, 3, 16)),
    "dense, by the layer": (layers.dense, {"kernel": (2, 3), "bias": (3,)}, normal(BATCH, 2, 3, 2)),
    "conv, valid": (conv(1, "VALID"), {"kernel": (3, 2, 2, 3), "bias": (3,)}, normal(BATCH, 5, 4, 2)),
    "conv, same": (conv(1, "SAME"), {"kernel": (2, 3, 1, 2), "bias": (2,)}, normal(BATCH, 4, 3, 1)),
    "conv, valid, strides 2": (conv(2, "VALID"), {"kernel": (3, 3, 1, 2), "bias": (2,)}, normal(BATCH, 8, 7, 1)),
    "conv, same, strides 2": (conv(2, "SAME"), {"kernel": (3, 3, 2, 2), "bias": (2,)}, normal(BATCH, 7, 6, 2)),
    "conv, same, strides 3": (conv(3, "SAME"), {"kernel": (2, 2, 1, 2), "bias": (2,)}, normal(BATCH, 7, 8, 1)),
    "conv, same, by squares": (conv(2, "SAME"), {"kernel": (4, 2, 1, 2), "bias": (2,)}, normal(BATCH, 7, 8, 1)),
    "conv, valid, by squares": (conv(3, "VALID"), {"kernel": (3, 6, 2, 2), "bias": (2,)}, normal(BATCH, 7, 9, 2)),
    "conv, strides 2, Gram form": (conv(2, "SAME"), {"kernel": (4, 4, 4, 24), "bias": (24,)}, normal(BATCH, 3, 4, 4)),
    "conv, Gram form": (conv(1, "SAME"), {"kernel": (3, 3, 4, 24), "bias": (24,)}, normal(BATCH, 2, 3, 4)),
    "group norm": (
        lambda weights, name, x: layers.group_norm(weights, name, x, groups=2),
        {"scale": (4,), "bias": (4,)},
        normal(BATCH, 2, 3, 4),
    ),
}


@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("case", LAYERS)
def test_norms_and_sums_are_those_of_each_examples_gradient(case, pulled):
    layer, shapes, x = LAYERS[case]
    weights = {f"a/{name}": tf.constant(normal(*shape, seed=5)) for name, shape in shapes.items()}
    pulls = {name: tf.constant(normal(*value.shape, seed=7)) for name, value in weights.items()} if pulled else {}
    recording = RecordingWeights(weights)
    output = layer(recording, "a", tf.constant(x))
    np.testing.assert_array_equal(output, layer(weights, "a", tf.constant(x)))
    cotangent = tf.constant(normal(*output.shape, seed=6))
    (use,) = recording.uses
    assert recording.without_closed_form() == []
    given = {"pulls": [pulls[name] for name in use.names]} if pulled else {}
    found = dict(zip(use.names, use.layer.example_gradients(use.inputs, cotangent, *use.weights, **given), strict=True))
    # The expected ones in float64.
    exact = {name: tf.cast(value, tf.float64) for name, value in weights.items()}
    inputs = x if x.dtype.kind == "i" else x.astype(np.float64)
    expected = []
    for index in range(BATCH):
        row = slice(index, index + 1)
        with tf.GradientTape() as tape:
            tape.watch(exact)
            one = layer(exact, "a", tf.constant(inputs[row]))
        gradients = tape.gradient(one, exact, output_gradients=tf.cast(cotangent[row], tf.float64))
        expected.append([tf.convert_to_tensor(gradients[name]) + np.float64(pulls.get(name, 0)) for name in exact])
    # A gradient is a sum over positions, of inputs that a normalisation has summed over the example for, twice; its
    # square has the same error twice. Squares are summed over all weights, in float32 but for the Gram forms.
    positions, size = np.prod(output.shape[1:-1], dtype=int), np.prod(x.shape[1:], dtype=int)
    before = 2 * size + ELEMENTARY + 4 if case == "group norm" else 0
    of_gradient = gamma(positions + 1 + before)
    bound = 2 * of_gradient + 2 * gamma(sum(np.size(value) for value in weights.values()) + 2)
    squares = [sum(np.square(gradient).sum() for gradient in gradients) for gradients in expected]
    result = sum(gradient.squared_norms() for gradient in found.values())
    assert result.dtype == tf.float64
    np.testing.assert_allclose(result, squares, atol=bound * max(squares))
    factors = np.array([0.5, 0.0, 0.75, 1.0])
    for index, name in enumerate(exact):
        result = found[name].weighted_sum(tf.constant(factors))
        assert (result.dtype, result.shape) == (tf.float64, weights[name].shape)
        total = sum(factor * gradients[index].numpy() for factor, gradients in zip(factors, expected, strict=True))
        # Of up to four gradients, each of which may err by as much.
        largest = max(np.abs(gradients[index]).max() for gradients in expected)
        np.testing.assert_allclose(result, total, atol=BATCH * of_gradient * largest)


def test_weights_read_by_name_or_used_twice_have_no_closed_form():
    weights = {"a/kernel": np.eye(2, dtype=np.float32), "a/bias": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}
    recording = RecordingWeights(weights)
    assert list(recording) == list(weights)
    assert len(recording) == 3
    layers.dense(recording, "a", tf.ones([1, 2]))
    assert recording.without_closed_form() == []
    np.testing.assert_array_equal(recording["b"], weights["b"])
    assert recording.without_closed_form() == ["b"]
    layers.dense(recording, "a", tf.ones([1, 2]))
    # Two uses of a dense layer at one position each are one use at two positions.
    assert recording.without_closed_form() == ["b"]
    # With several positions in one of the uses, they are not.
    layers.dense(recording, "a", tf.ones([1, 5, 2]))
    assert recording.without_closed_form() == ["a/bias", "a/kernel", "b"]


@pytest.mark.parametrize("wrap", [tf.function, lambda layer: lambda x: tf.map_fn(layer, x[tf.newaxis])])
def test_a_layer_in_an_inner_function_has_no_closed_form(wrap):
    weights = {"a/kernel": np.eye(2, dtype=np.float32), "a/bias": np.zeros(2, np.float32)}

    @tf.function
    def without_closed_form():
        recording = RecordingWeights(weights)
        wrap(lambda x: layers.dense(recording, "a", x))(tf.ones([3, 2]))
        return recording.without_closed_form()

    assert [name.numpy() for name in without_closed_form()] == [b"a/bias", b"a/kernel"]


def test_a_convolution_over_unknown_sizes_has_no_closed_form():
    weights = {"a/kernel": np.ones([2, 2, 1, 1], np.float32), "a/bias": np.zeros(1, np.float32)}
    unknown = []

    @tf.function(input_signature=[tf.TensorSpec([None, None, 3, 1])])
    def convolve(x):
        recording = RecordingWeights(weights)
        output = layers.conv2d(recording, "a", x)
        unknown.extend(recording.without_closed_form())
        return output

    np.testing.assert_array_equal(convolve(tf.ones([1, 2, 3, 1])), [[[[4.0], [4.0]]]])
    assert unknown == ["a/bias", "a/kernel"]
