"""Computes the convolutions of a stack (batch) of clients, each with kernels of its own, as batched matrix products.

`tf.vectorized_map` has rules for convolutions whose kernel all clients share. For kernels that differ between clients
TensorFlow 2.14 makes a loop over the clients, which suits a CPU: one convolution keeps all cores busy. On a GPU the
loop launches each small kernel once for every client. The batched form launches each kernel once for all clients. One
row of a matrix has all the inputs that a position of the output meets, and each client's rows are multiplied by that
client's kernel (Chellapilla, Puri & Simard, "High Performance Convolutional Neural Networks for Document Processing",
IWFHR 2006). The rows have as many numbers as the inputs, times height and width of the kernel.

Results of both forms are equal up to rounding. TensorFlow's form is kept for convolutions with dilations, explicit
paddings, two different strides, or channels as the second axis, and for those whose height, width or number of channels
is unknown when the computation is built. The rules replace TensorFlow's rules in the whole process. Outside of
`batched_convolutions` a replacement only calls TensorFlow's rule.
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from tff_pdp.models.example_gradients import inputs_by_offset, same_padding

_is_batched: ContextVar[bool] = ContextVar("is batched", default=False)
# Imported by path: the package has a function named as the module.
_pfor: Any = importlib.import_module("tensorflow.python.ops.parallel_for.pfor")


@contextlib.contextmanager
def batched_convolutions(is_batched: bool) -> Iterator[None]:
    """Sets whether stacks that are traced in the `with` block have the batched form; by default they do not."""
    token = _is_batched.set(is_batched)
    try:
        yield
    finally:
        _is_batched.reset(token)


def convolve(inputs: tf.Tensor, kernels: tf.Tensor, strides: int, padding: str) -> tf.Tensor:
    """Computes a convolution for each client: float32 `[clients, batch, height', width', out]`.

    Args:
      inputs: float32 `[clients, batch, height, width, in]`; all sizes but the first two must be known when the
        computation is built, here and in the other functions of this module.
      kernels: float32 `[clients, kernel height, kernel width, in, out]`.
      strides: stride in height and in width.
      padding: `VALID` or `SAME`, as in TensorFlow.
    """
    window = _sizes(kernels)[1:3]
    sizes_out = _sizes_after(_sizes(inputs)[2:4], window, strides, padding)
    rows = _rows(_padded(inputs, sizes_out, window, strides, padding), sizes_out, window, strides)
    return _by_position(rows @ _as_matrices(kernels), inputs, sizes_out)


def input_gradient(
    sizes_in: Sequence[int], kernels: tf.Tensor, cotangents: tf.Tensor, strides: int, padding: str
) -> tf.Tensor:
    """Computes the gradient w.r.t. the inputs: float32 `[clients, batch, height, width, in]`.

    The gradient is a convolution of stride 1 with the kernel turned by 180 degrees. Its input is the cotangent, with
    `strides - 1` zeros between neighbours and with zeros around.

    Args:
      sizes_in: height and width of the inputs.
      kernels: float32 `[clients, kernel height, kernel width, in, out]`.
      cotangents: float32 `[clients, batch, height', width', out]`.
      strides: stride of the layer.
      padding: padding of the layer.
    """
    window, sizes_out = _sizes(kernels)[1:3], _sizes(cotangents)[2:4]
    apart, around = _merged(cotangents), []
    for size_in, size_out, side in zip(sizes_in, sizes_out, window, strict=True):
        before = side - 1
        if padding == "SAME":
            before -= same_padding(size_in, size_out, side, strides)[0]
        around.append([before, size_in + side - 1 - before - ((size_out - 1) * strides + 1)])
    if strides > 1:
        high, wide, channels = _sizes(apart)[1:]
        between = [0, strides - 1]
        apart = tf.pad(tf.reshape(apart, [-1, high, 1, wide, 1, channels]), [[0, 0]] * 2 + [between, [0, 0]] * 2)
        apart = tf.reshape(apart, [-1, high * strides, wide * strides, channels])
        apart = apart[:, : (high - 1) * strides + 1, : (wide - 1) * strides + 1]
    apart = _split(tf.pad(apart, [[0, 0], *around, [0, 0]]), cotangents)
    turned = tf.transpose(tf.reverse(kernels, axis=[1, 2]), [0, 1, 2, 4, 3])
    return _by_position(_rows(apart, sizes_in, window, 1) @ _as_matrices(turned), cotangents, sizes_in)


def kernel_gradient(
    inputs: tf.Tensor, window: Sequence[int], cotangents: tf.Tensor, strides: int, padding: str
) -> tf.Tensor:
    """Computes the gradient w.r.t. the kernels: float32 `[clients, *window, in, out]`.

    Args:
      inputs: float32 `[clients, batch, height, width, in]`.
      window: height and width of the kernels.
      cotangents: float32 `[clients, batch, height', width', out]`.
      strides: stride of the layer.
      padding: padding of the layer.
    """
    sizes_out, channels_out = _sizes(cotangents)[2:4], _sizes(cotangents)[4]
    rows = _rows(_padded(inputs, sizes_out, window, strides, padding), sizes_out, window, strides)
    of_outputs = tf.reshape(cotangents, [*_leading(cotangents, math.prod(sizes_out)), channels_out])
    gradients = tf.matmul(rows, of_outputs, transpose_a=True)
    return tf.reshape(gradients, [tf.shape(inputs)[0], *window, _sizes(inputs)[4], channels_out])


def _sizes(values: tf.Tensor) -> list[Any]:
    return values.shape.as_list()


def _sizes_after(sizes_in: Sequence[int], window: Sequence[int], strides: int, padding: str) -> list[int]:
    """Returns height and width of a convolution's output."""
    lost = window if padding == "VALID" else [1, 1]
    return [(size - side) // strides + 1 for size, side in zip(sizes_in, lost, strict=True)]


def _merged(values: tf.Tensor) -> tf.Tensor:
    """Reshapes `[clients, batch, ...]` to `[clients * batch, ...]`."""
    leading = tf.shape(values)[:2]
    return tf.reshape(values, [leading[0] * leading[1], *_sizes(values)[2:]])


def _split(values: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Reshapes `[clients * batch, ...]` to `[clients, batch, ...]`, with the first two sizes of `like`."""
    return tf.reshape(values, [*tf.unstack(tf.shape(like)[:2]), *_sizes(values)[1:]])


def _leading(values: tf.Tensor, positions: int) -> list[tf.Tensor]:
    """Returns the number of clients and, for each client, the number of rows: `positions` for each example."""
    leading = tf.shape(values)[:2]
    return [leading[0], leading[1] * positions]


def _padded(
    inputs: tf.Tensor, sizes_out: Sequence[int], window: Sequence[int], strides: int, padding: str
) -> tf.Tensor:
    if padding == "VALID":
        return inputs
    around = map(same_padding, _sizes(inputs)[2:4], sizes_out, window, [strides] * 2)
    return tf.pad(inputs, [[0, 0], [0, 0], *around, [0, 0]])


def _rows(inputs: tf.Tensor, sizes_out: Sequence[int], window: Sequence[int], strides: int) -> tf.Tensor:
    """Returns what each position of the output meets, `[clients, batch * height' * width', values]`."""
    seen = tf.concat(inputs_by_offset(_merged(inputs), sizes_out, window, strides), axis=-1)
    return tf.reshape(seen, [*_leading(inputs, math.prod(sizes_out)), seen.shape[-1]])


def _as_matrices(kernels: tf.Tensor) -> tf.Tensor:
    *sides, channels_out = _sizes(kernels)[1:]
    return tf.reshape(kernels, [tf.shape(kernels)[0], math.prod(sides), channels_out])


def _by_position(rows: tf.Tensor, like: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Reshapes `[clients, batch * height * width, channels]` to `[clients, batch, height, width, channels]`."""
    return tf.reshape(rows, [*tf.unstack(tf.shape(like)[:2]), *sizes, rows.shape[-1]])


# The rules of `tf.vectorized_map`
# --------------------------------


def _replace(operation: str, stacked_if: int, batched: Callable[[Any, int, str], tf.Tensor | None]) -> None:
    """Replaces TensorFlow's rule for `operation`.

    Args:
      operation: type of the operation.
      stacked_if: number of the input for which TensorFlow's rule makes a loop if clients do not share the input.
      batched: `(operation's inputs, stride, padding) -> result`; None if a size is unknown.
    """
    of_tensorflow = _pfor._pfor_converter_registry.pop(operation)

    @_pfor.RegisterPFor(operation)
    def convert(pfor_input: Any) -> Any:
        if _is_batched.get() and pfor_input.input(stacked_if).is_stacked:
            strides, padding = list(pfor_input.get_attr("strides")), pfor_input.get_attr("padding").decode()
            is_plain = (
                pfor_input.get_attr("data_format") == b"NHWC"
                and padding in ("VALID", "SAME")
                and set(pfor_input.get_attr("dilations")) == {1}
                and strides[1] == strides[2]
            )
            result = batched(pfor_input, strides[1], padding) if is_plain else None
            if result is not None:
                return _pfor.wrap(result, True)
        return of_tensorflow(pfor_input)


def _are_known(*tensors: tf.Tensor) -> bool:
    """Checks whether all sizes after the first, of the batch or of the kernel's height, are known."""
    return all(tensor.shape.rank == 4 and tensor.shape[1:].is_fully_defined() for tensor in tensors)


def _convert_convolution(pfor_input: Any, strides: int, padding: str) -> tf.Tensor | None:
    # Sizes are those of the operation for one client: the conversion may have lost them.
    x, kernel = pfor_input.op.inputs
    if not _are_known(x, kernel) or kernel.shape[0] is None:
        return None
    return convolve(_stacked(pfor_input, 0, x.shape), _stacked(pfor_input, 1, kernel.shape), strides, padding)


def _convert_input_gradient(pfor_input: Any, strides: int, padding: str) -> tf.Tensor | None:
    _, kernel, cotangent = pfor_input.op.inputs
    result = pfor_input.op.outputs[0]
    if not _are_known(result, kernel, cotangent) or kernel.shape[0] is None:
        return None
    kernels, cotangents = _stacked(pfor_input, 1, kernel.shape), _stacked(pfor_input, 2, cotangent.shape)
    return input_gradient(result.shape[1:3].as_list(), kernels, cotangents, strides, padding)


def _convert_kernel_gradient(pfor_input: Any, strides: int, padding: str) -> tf.Tensor | None:
    x, _, cotangent = pfor_input.op.inputs
    window = pfor_input.op.outputs[0].shape[:2]
    if not _are_known(x, cotangent) or not window.is_fully_defined():
        return None
    inputs, cotangents = _stacked(pfor_input, 0, x.shape), _stacked(pfor_input, 2, cotangent.shape)
    return kernel_gradient(inputs, window.as_list(), cotangents, strides, padding)


def _stacked(pfor_input: Any, number: int, shape: tf.TensorShape) -> tf.Tensor:
    pfor_input.stack_inputs([number])
    values = pfor_input.stacked_input(number)
    values.set_shape(tf.TensorShape([None]).concatenate(shape))
    return values


_replace("Conv2D", 1, _convert_convolution)
_replace("Conv2DBackpropInput", 1, _convert_input_gradient)
_replace("Conv2DBackpropFilter", 0, _convert_kernel_gradient)
