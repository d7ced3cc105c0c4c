"""The batched form of convolutions with a kernel for each client, beside TensorFlow's convolution of one client."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.live_operations import live_operations
from tests.tiers import amount
from tff_pdp.processes import stacked_convolutions
from tff_pdp.processes.stacked_convolutions import batched_convolutions
from tff_pdp.processes.vectorizable import map_stack

LOOPS = {"While", "StatelessWhile"}
CONVOLUTIONS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
LISTS = ("TensorListSetItem", "TensorListStack", "TensorListReserve", "TensorListGetItem", "TensorListFromTensor")


@st.composite
def layers(draw):
    """Sizes of a layer: clients, examples, height, width, kernel height and width, in, out, stride and padding."""
    padding = draw(st.sampled_from(["VALID", "SAME"]))
    window = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    smallest = window if padding == "VALID" else (1, 1)
    sizes = [draw(st.integers(low, low + 6)) for low in smallest]
    clients, examples, size_in, size_out = (draw(st.integers(1, high)) for high in (3, 3, 4, 4))
    return clients, examples, sizes, window, size_in, size_out, draw(st.integers(1, 4)), padding


def draws(layer, seed=0):
    clients, examples, sizes, window, size_in, size_out, *_ = layer
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(clients, examples, *sizes, size_in)).astype(np.float32)
    kernels = rng.normal(size=(clients, *window, size_in, size_out)) / np.sqrt(np.prod(window) * size_in)
    return tf.constant(x), tf.constant(kernels.astype(np.float32))


def assert_close(found, expected):
    """Within 1e-6 of the largest value; float64 is the truth."""
    largest = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * largest)


@given(layers())
@settings(max_examples=amount(test=40, all=300), deadline=None)
def test_every_form_equals_the_convolutions_of_the_clients(layer):
    x, kernels = draws(layer)
    window, strides, padding = layer[3], *layer[-2:]
    truth = [], [], []
    for own_x, own_kernel in zip(tf.cast(x, tf.float64), tf.cast(kernels, tf.float64), strict=True):
        with tf.GradientTape() as tape:
            tape.watch([own_x, own_kernel])
            output = tf.nn.conv2d(own_x, own_kernel, strides, padding)
            total = tf.reduce_sum(tf.sin(output))
        for kept, value in zip(truth, (output, *tape.gradient(total, [own_x, own_kernel])), strict=True):
            kept.append(value.numpy())
    outputs = stacked_convolutions.convolve(x, kernels, strides, padding)
    cotangents = tf.constant(np.cos(np.stack(truth[0])).astype(np.float32))
    of_inputs = stacked_convolutions.input_gradient(layer[2], kernels, cotangents, strides, padding)
    of_kernels = stacked_convolutions.kernel_gradient(x, window, cotangents, strides, padding)
    for found, expected in zip((outputs, of_inputs, of_kernels), truth, strict=True):
        assert_close(found.numpy(), np.stack(expected))


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param((2, 96, (8, 8), (3, 3), 3, 16, 1, "VALID"), id="VALID"),
        pytest.param((3, 144, (9, 9), (5, 5), 4, 32, 2, "SAME"), id="SAME, strides 2"),
    ],
)
def test_an_example_keeps_its_bits_whoever_else_is_in_the_batch(layer):
    """DP-SGD takes this for granted, for batches in whole blocks of 48 rows."""
    x, kernels = draws(layer)
    strides, padding = layer[-2:]

    def results(chosen):
        outputs = stacked_convolutions.convolve(chosen, kernels, strides, padding)
        return outputs, stacked_convolutions.input_gradient(layer[2], kernels, tf.sin(outputs), strides, padding)

    order = np.random.default_rng(0).permutation(layer[1])
    for whole, part, moved in zip(results(x), results(x[:, :48]), results(tf.gather(x, order, axis=1)), strict=True):
        np.testing.assert_array_equal(part, whole[:, :48])
        np.testing.assert_array_equal(moved, tf.gather(whole, order, axis=1))


def traced(step, *specs, is_batched=True):
    @tf.function(autograph=False)
    def function(*arguments):
        with batched_convolutions(is_batched):
            return map_stack(lambda own: step(*own), arguments)

    return function.get_concrete_function(*specs)


def output_and_gradients(strides, padding):
    def step(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            output = tf.nn.conv2d(x, kernel, strides, padding)
            total = tf.reduce_sum(tf.sin(output))
        return [output, *tape.gradient(total, [x, kernel])]

    return step


@pytest.mark.parametrize(("strides", "padding"), [(1, "VALID"), (2, "SAME")])
def test_a_stack_has_one_product_in_place_of_a_loop_and_the_results_of_the_loop(strides, padding):
    layer = (3, 4, (9, 8), (3, 3), 2, 5, strides, padding)
    x, kernels = draws(layer)
    # The number of clients and of examples is not known before the call.
    specs = [tf.TensorSpec([None, None, *x.shape[2:]]), tf.TensorSpec([None, *kernels.shape[1:]])]
    batched, loop = (
        traced(output_and_gradients(strides, padding), *specs, is_batched=is_batched) for is_batched in (True, False)
    )
    operations = live_operations(batched)
    assert not {*LOOPS, *CONVOLUTIONS, *LISTS} & set(operations)
    assert operations["BatchMatMulV2"] == 3
    assert LOOPS & set(live_operations(loop))
    for found, expected in zip(batched(x, kernels), loop(x, kernels), strict=True):
        assert_close(found.numpy(), expected.numpy())


def test_an_empty_batch_has_gradients_of_zeros():
    layer = (2, 0, (6, 6), (3, 3), 1, 2, 1, "VALID")
    x, kernels = draws(layer)
    specs = [tf.TensorSpec([None, None, *x.shape[2:]]), tf.TensorSpec([None, *kernels.shape[1:]])]
    output, of_x, of_kernels = traced(output_and_gradients(1, "VALID"), *specs)(x, kernels)
    assert output.shape == (2, 0, 4, 4, 2)
    assert of_x.shape == x.shape
    np.testing.assert_array_equal(of_kernels, np.zeros(kernels.shape))


def test_clients_with_one_kernel_share_one_convolution_forward():
    """With a shared kernel TensorFlow's rule is better: all clients' examples are one batch."""
    x, kernels = draws((3, 4, (6, 6), (3, 3), 2, 5, 1, "VALID"))
    kernel = kernels[0]

    def step(own_x):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            output = tf.nn.conv2d(own_x, kernel, 1, "VALID")
            total = tf.reduce_sum(tf.sin(output))
        return [output, tape.gradient(total, kernel)]

    batched, loop = (
        traced(step, tf.TensorSpec([None, None, *x.shape[2:]]), is_batched=is_batched) for is_batched in (True, False)
    )
    operations = live_operations(batched)
    assert operations["Conv2D"] == 1
    assert not {*LOOPS, "Conv2DBackpropFilter"} & set(operations)
    for found, expected in zip(batched(x), loop(x), strict=True):
        assert_close(found.numpy(), expected.numpy())


@pytest.mark.parametrize(
    "convolve",
    [
        pytest.param(lambda x, kernel: tf.nn.conv2d(x, kernel, 1, "VALID", dilations=2), id="dilations"),
        pytest.param(lambda x, kernel: tf.nn.conv2d(x, kernel, 1, [[0, 0], [1, 1], [0, 1], [0, 0]]), id="explicit"),
        pytest.param(lambda x, kernel: tf.nn.conv2d(x, kernel, [1, 1, 2, 1], "SAME"), id="two strides"),
    ],
)
def test_other_convolutions_keep_the_loop_of_tensorflow(convolve):
    x, kernels = draws((2, 3, (7, 7), (2, 2), 2, 3, 1, "VALID"))
    specs = [tf.TensorSpec([None, None, *x.shape[2:]]), tf.TensorSpec([None, *kernels.shape[1:]])]
    function = traced(convolve, *specs)
    assert LOOPS & set(live_operations(function))
    expected = [convolve(own_x, kernel).numpy() for own_x, kernel in zip(x, kernels, strict=True)]
    assert_close(function(x, kernels).numpy(), np.stack(expected))


def test_sizes_that_are_not_known_keep_the_loop_of_tensorflow():
    x, kernels = draws((2, 3, (7, 7), (2, 2), 2, 3, 1, "VALID"))
    specs = [tf.TensorSpec([None, None, None, None, 2]), tf.TensorSpec([None, *kernels.shape[1:]])]
    function = traced(output_and_gradients(1, "VALID"), *specs)
    assert LOOPS & set(live_operations(function))
    expected = output_and_gradients(1, "VALID")(x[1], kernels[1])
    for found, own in zip(function(x, kernels), expected, strict=True):
        assert_close(found.numpy()[1], own.numpy())
