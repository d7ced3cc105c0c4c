import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.algorithms.base import map_weights, split
from tff_pdp.algorithms.shared_parts.dp_pfed_dsu import magnitude_masks, mask_size, masked_names
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_mlp
from tff_pdp.models.resnet import build_resnet20


def test_of_each_layer_the_share_of_largest_magnitude():
    body = {
        "first": tf.constant([[1.0, -9.0, 2.0], [3.0, 4.0, -5.0]]),
        # Small beside the first layer's, but by itself.
        "second": tf.constant([0.1, -0.3, 0.2, 0.0]),
        "bias": tf.constant([0.0, 7.0]),
    }
    masks = magnitude_masks(body, ["first", "second"], 0.5)
    assert list(masks) == ["first", "second", "bias"]
    np.testing.assert_array_equal(masks["first"], [[0, 1, 0], [0, 1, 1]])
    np.testing.assert_array_equal(masks["second"], [0, 1, 1, 0])
    np.testing.assert_array_equal(masks["bias"], [1, 1])
    assert all(mask.dtype == tf.float32 for mask in masks.values())
    assert mask_size(masks) == 3 + 2 + 2


@pytest.mark.parametrize(
    ("shape", "sparsity", "kept"),
    [
        ((3, 3, 4, 5), 0.05, 9),
        ((10, 10), 0.05, 5),
        # Rounded up, but not by what float64 adds to 0.07 * 100.
        ((5, 6), 0.05, 2),
        ((10, 10), 0.07, 7),
        ((2, 2), 1e-6, 1),
        ((5, 6), 0.999, 30),
        ((5, 6), 1.0, 30),
    ],
)
def test_how_many_are_kept(shape, sparsity, kept):
    body = {"kernel": tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)}
    mask = magnitude_masks(body, ["kernel"], sparsity)["kernel"].numpy()
    assert set(np.unique(mask)) <= {0.0, 1.0}
    assert mask.sum() == kept
    sizes = np.abs(body["kernel"].numpy())
    assert sizes[mask == 1].min() > sizes[mask == 0].max(initial=-1.0)


def test_equal_magnitudes_at_the_border_are_all_in():
    body = {"kernel": tf.constant([[3.0, -2.0], [2.0, 2.0], [1.0, 0.0]]), "zeros": tf.zeros([2, 2])}
    masks = magnitude_masks(body, ["kernel", "zeros"], 1 / 3)
    np.testing.assert_array_equal(masks["kernel"], [[1, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal(masks["zeros"], [[1, 1], [1, 1]])


def test_all_weights_are_all_ones():
    body = {"kernel": tf.constant([[3.0, 0.0], [-2.0, 1e-30]])}
    np.testing.assert_array_equal(magnitude_masks(body, ["kernel"], 1.0)["kernel"], [[1, 1], [1, 1]])


def test_masks_of_stacked_weights_are_those_of_each():
    stack = tf.constant(np.random.default_rng(0).normal(size=(3, 4, 5)), tf.float32)
    stacked = tf.vectorized_map(lambda kernel: magnitude_masks({"kernel": kernel}, ["kernel"], 0.2)["kernel"], stack)
    for kernel, mask in zip(stack, stacked, strict=True):
        np.testing.assert_array_equal(mask, magnitude_masks({"kernel": kernel}, ["kernel"], 0.2)["kernel"])
    assert stacked.numpy().sum() == 3 * 4


BODY = collections.OrderedDict(
    [
        ("z/kernel", np.zeros([3, 3, 1, 2])),
        ("z/bias", np.zeros([2])),
        ("norm/scale", np.zeros([2])),
        ("a/kernel", np.zeros([8, 4])),
        ("a/bias", np.zeros([4])),
        ("m/kernel", np.zeros([4, 4])),
    ]
)


@pytest.mark.parametrize(
    ("sparse_layers", "expected"),
    [
        (1, ["m/kernel"]),
        (2, ["a/kernel", "m/kernel"]),
        (3, ["z/kernel", "a/kernel", "m/kernel"]),
        (4, ["z/kernel", "a/kernel", "m/kernel"]),
        (0, []),
    ],
)
def test_the_last_layers_in_the_bodys_order_and_of_them_kernels_alone(sparse_layers, expected):
    assert masked_names(BODY, sparse_layers) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (build_mlp((4,), 2, (3, 3)), ["dense_0/kernel", "dense_1/kernel"]),
        (build_cnn((8, 8, 1), 2, (2, 2), hidden_units=4), ["conv_0/kernel", "conv_1/kernel", "dense_0/kernel"]),
        (
            build_resnet20((8, 8, 1), 2),
            [f"stage_2/block_{block}/conv_{conv}/kernel" for block in (1, 2) for conv in (0, 1)],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_last_four_layers_of_a_models_body(model, expected):
    body = split(model.init(0), model.head)[1]
    assert masked_names(body, 4) == expected


def test_a_masked_body_is_zero_where_the_mask_is():
    body = collections.OrderedDict(kernel=tf.constant([1.0, -2.0]), bias=tf.constant([3.0]))
    masked = map_weights(tf.multiply, body, {"bias": tf.constant([1.0]), "kernel": tf.constant([0.0, 1.0])})
    assert list(masked) == ["kernel", "bias"]
    np.testing.assert_array_equal(masked["kernel"], [0, -2])
    np.testing.assert_array_equal(masked["bias"], [3])
