"""Sums clipped per-example gradients, with a single backward pass through the network.

There is one forward pass, and one backward pass to the outputs of the model's layers (`tff_pdp.models.layers`). The
outputs' cotangents and the layers' inputs give each example's norm, layer by layer in closed form. With the clip
factors, the same cotangents and inputs give the sum, so no second backward pass through the network is needed (Bu et
al., "Differentially Private Optimization on Large Model at Small Cost", arXiv:2210.00038, ICML 2023). For a model with
weights outside of these layers, every example's gradient is computed, which is slower.

A sum in float32 may move by far more than one example's clip norm when an example is added or removed, because every
later rounding may change (Casacuberta et al., "Widespread Underestimation of Sensitivity in Differentially Private
Libraries and How to Fix It", arXiv:2207.10635, CCS 2022). So norms, factors and sums are in float64, and norms and sums
are made of the same float32 numbers (`tff_pdp.models.example_gradients`). The forward and the backward pass are in
float32. Errors of the resulting gradients do not matter, because exactly these gradients are clipped.

Assumes: `predict` treats each example on its own, in the order of axis 0, without batch statistics. For each example, a
  layer's inputs, its output's cotangents and products of its matrices are float32 numbers whose bits do not depend on
  other examples. As far as tests/privacy/mechanisms/test_row_independence.py finds on its machine, TensorFlow's kernels
  fulfil this for whole blocks of rows, but not for other numbers of rows. So batches are padded to whole blocks.
"""

import collections
import dataclasses
import logging
from typing import Any

import tensorflow as tf

from tff_pdp.models.base import Model, Weights, pad
from tff_pdp.models.dropout import RowDraws
from tff_pdp.models.example_gradients import CANCELLATION, ExampleGradients, Held, Repeated, keep
from tff_pdp.models.layers import RecordingWeights, Use

_logger = logging.getLogger(__name__)
_models_logged: set[str] = set()

# Kernels take registers full of numbers, and compute the rest at the end of a tensor by other steps, with other bits:
# tanh and exponentials 16 numbers at once with AVX-512, matrix products 24 or 48 rows. Whole blocks of this size leave
# no rest on any of these processors.
ROWS_OF_A_BLOCK = 48

# Covers all roundings from the bounds of squared norms, which may be too small by 2**-25, to the factors.
_NORM_ALLOWANCE = 1.0 + 2.0**-24


def clipped_sum(
    model: Model,
    weights: Weights,
    x: tf.Tensor,
    y: tf.Tensor,
    *,
    clip_norm: tf.Tensor,
    included: tf.Tensor,
    pull: Weights | None = None,
    most_examples: tf.Tensor | None = None,
    is_in_blocks: bool = False,
    draws: RowDraws | None = None,
) -> Weights:
    """Returns `sum_i included_i * min(1, clip_norm / |g_i|) * g_i`, with `g_i` the gradient of example i's loss.

    With an infinite clip norm, no `pull` and all examples included, the result is the gradient of the losses' sum, up
    to rounding.

    Guarantee: the result is `sum_i part_i + error`. Each `part_i` is a function of example i, its random draws, the
      weights, the pull and the clip norm alone, and is zero if the example is not included. In exact arithmetic,
      `|part_i| <= clip_norm`, in L2 norm over all weights jointly. For n included examples, and layers with at most
      `positions` positions, `|error| <= sum_error(n, positions) * clip_norm`. So adding or removing one example moves
      the sum by at most `(1 + 2 * sum_error(n, positions)) * clip_norm`, where n is the size of the larger batch. If
      `most_examples` is passed and is at least n, the sum moves by at most `clip_norm`. An example that is not included
      does not move the sum, whatever its x and y are. An example whose gradient is not finite does not move the sum,
      either, unless the clip norm is infinite; the sum is then not finite.
    Assumes: as in the module's docstring; weights are finite; the pull depends on these examples only through released
      values; each weight has fewer than 2**27 values, each layer fewer than 2**20 inputs or outputs at one position,
      and there are fewer than 1000 weights and layers each.

    Args:
      model: model with the loss of each example.
      weights: weights by name, float32.
      x: `[batch, ...]`; the batch may be empty.
      y: `[batch, ...]`; zero must be a valid label.
      clip_norm: float32 scalar, may be infinite.
      included: float32 `[batch]`, each 0 or 1.
      pull: tensors like `weights`, added to each example's gradient before the clip, like the gradient of a penalty in
        every example's loss. `g_i` then includes the pull.
      most_examples: largest number of included examples, a public float scalar. Gradients are then clipped to the clip
        norm minus the sum's possible error; the difference may be zero for hundreds of thousands of examples.
      is_in_blocks: whether the batch already has a whole number of blocks of `ROWS_OF_A_BLOCK` rows, at least one;
        otherwise rows are added.
      draws: random draws of the examples, for a model with dropout; without draws, nothing is dropped.

    Returns:
      float64 tensors with the names, order and shapes of `weights`; zeros for weights that the losses do not depend on.
    """
    if not is_in_blocks:
        x, y, included = _in_blocks(x), _in_blocks(y), _in_blocks(included)
        draws = draws and dataclasses.replace(draws, rows=_in_blocks(draws.rows))
    # A loss may refuse an invalid label; the x of such examples is kept out of the sum below.
    y = keep(included, y)
    gradients, norms = _gradients_and_norms(model, weights, x, y, pull, draws)
    clip_norm = tf.cast(clip_norm, tf.float64)
    if most_examples is not None:
        positions = max(of_weight.positions for of_weight in gradients.values())
        left = tf.maximum(1.0 - 2.0 * sum_error(tf.cast(most_examples, tf.float64), positions), 0.0)
        clip_norm = tf.where(tf.math.is_inf(clip_norm), clip_norm, clip_norm * left)
    factors = tf.cast(included, tf.float64) * _clip_factors(norms, clip_norm)
    return collections.OrderedDict(
        (name, gradients[name].weighted_sum(factors) if name in gradients else tf.zeros(tf.shape(value), tf.float64))
        for name, value in weights.items()
    )


def sum_error(num_examples: Any, positions: int = 1) -> Any:
    """Returns the bound on the error of `clipped_sum`, in units of the clip norm.

    It is `1.01 * 2**-53 * (num_examples * positions + 20) * num_examples * CANCELLATION`: below 2**-16 for 16384
    examples at one position, 4096 at 16 positions, or 2048 at 64.

    Args:
      num_examples: largest number of included examples; a number, or a float64 scalar.
      positions: largest number of positions that a dense layer or a convolution is applied at; 1 for layers over flat
        examples, and for layers that compute each example's gradient by itself.
    """
    return 1.01 * 2.0**-53 * (num_examples * positions + 20) * num_examples * CANCELLATION


def _gradients_and_norms(
    model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor, pull: Weights | None, draws: RowDraws | None = None
) -> tuple[dict[str, ExampleGradients], tf.Tensor]:
    """Returns each example's gradients by weight, where there are any, and upper bounds on norms: float64 `[batch]`."""
    pull = pull or {}
    gradients, losses = _backward_to_layers(model, weights, x, y, pull, draws) or (
        _by_mapping(model, weights, x, y, pull, draws),
        y,
    )
    num_examples = tf.shape(losses)[0]
    squares = tf.add_n([of_weight.squared_norms() for of_weight in gradients.values()])
    alone = {name: Repeated(value) for name, value in pull.items() if name not in gradients}
    for of_weight in alone.values():
        squares += of_weight.squared_norms()
    # The reshape changes nothing; it fails for a model whose layers do not see one example in each row.
    norms = tf.reshape(tf.sqrt(squares) * _NORM_ALLOWANCE, [num_examples])
    return {**gradients, **alone}, norms


def _clip_factors(norms: tf.Tensor, clip_norm: tf.Tensor) -> tf.Tensor:
    """Returns each gradient's factor: float64, zero where its norm is not finite and clipped."""
    unclipped = tf.logical_or(norms <= clip_norm, tf.math.is_inf(clip_norm))
    clipped = tf.where(tf.math.is_finite(norms), clip_norm / norms, tf.zeros([], tf.float64))
    return tf.where(unclipped, tf.ones([], tf.float64), clipped)


def _backward_to_layers(
    model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor, pull: Weights, draws: RowDraws | None
) -> tuple[dict[str, ExampleGradients], tf.Tensor] | None:
    """Runs the model forward and back to the outputs of its layers; None if they do not account for every weight.

    Returns:
      Each example's gradients by the weights that layers use, and the losses `[batch]`.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = RecordingWeights(weights, tape)
        losses = model.training_loss(recording, x, y, draws)
        total = tf.reduce_sum(losses)
    missing = recording.without_closed_form() or _not_by_example(recording.uses, losses)
    if missing or not recording.uses:
        if model.name not in _models_logged:
            _models_logged.add(model.name)
            _logger.warning(
                "model %s: gradients of single examples are slow, because these weights are not used by exactly one "
                "layer of tff_pdp.models.layers: %s",
                model.name,
                ", ".join(missing or weights),
            )
        return None
    groups = recording.groups()
    outputs = [[use.output for use in group] for group in groups]
    cotangents: Any = tape.gradient(total, outputs, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    found: dict[str, ExampleGradients] = {}
    for group, own_cotangents in zip(groups, cotangents, strict=True):
        first = group[0]
        inputs = _side_by_side([use.inputs for use in group])
        cotangent = _side_by_side([tf.convert_to_tensor(one) for one in own_cotangents])
        pulls = [pull.get(name) for name in first.names]
        own = first.layer.example_gradients(inputs, cotangent, *first.weights, pulls=pulls)
        found.update(zip(first.names, own, strict=True))
    return found, losses


def _side_by_side(values: list[tf.Tensor]) -> tf.Tensor:
    """Returns the values of several uses of a layer as those of one use, at several positions."""
    return values[0] if len(values) == 1 else tf.stack(values, axis=1)


def _not_by_example(uses: list[Use], losses: tf.Tensor) -> list[str]:
    """Lists weights of layers whose rows cannot be the examples: their number is fixed, unlike that of the losses."""
    if losses.shape[0] is not None:
        return []
    return [name for use in uses if use.output.shape[0] is not None for name in use.names]


def _by_mapping(
    model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor, pull: Weights, draws: RowDraws | None
) -> dict[str, ExampleGradients]:
    """Returns the gradients of all examples by all weights, for any model."""
    tensors = {name: tf.convert_to_tensor(value) for name, value in weights.items()}

    def gradient(example: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        example_x, example_y, row = example
        own = draws and dataclasses.replace(draws, rows=row[tf.newaxis])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(tensors)
            total = tf.reduce_sum(model.training_loss(tensors, example_x[tf.newaxis], example_y[tf.newaxis], own))
        found = tape.gradient(total, tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        dense = {name: tf.convert_to_tensor(found[name]) for name in tensors}
        return {name: value + pull[name] if name in pull else value for name, value in dense.items()}

    of_all = tf.vectorized_map(gradient, (x, y, tf.zeros_like(y) if draws is None else draws.rows))
    shapes: dict[str, Any] = {name: tensor.shape.as_list() for name, tensor in tensors.items()}
    return {name: Held((of_all[name],), shapes[name]) for name in tensors}


def num_blocks(num_rows: tf.Tensor) -> tf.Tensor:
    """Returns the number of blocks that `num_rows` rows fill, int32 scalar: the last one in part, and at least one."""
    return tf.maximum(tf.math.floordiv(num_rows + ROWS_OF_A_BLOCK - 1, ROWS_OF_A_BLOCK), 1)


def _in_blocks(values: tf.Tensor) -> tf.Tensor:
    """Pads `values [batch, ...]` with rows of zeros up to the end of a block, at least one block.

    An example's part of the sum then depends neither on the number of other examples nor on its place among them. And
    oneDNN's convolutions give an empty batch a wrong shape. Values in whole blocks are not copied.
    """
    num_rows = tf.shape(values)[0]
    missing = ROWS_OF_A_BLOCK * num_blocks(num_rows) - num_rows
    paddings: Any = [[0, missing], *[[0, 0]] * (values.shape.rank - 1)]
    return pad(values, paddings)
