"""Sums of clipped per-example gradients, from per-example norms that are found without per-example gradients.

One forward pass, and one backward pass to the outputs of the model's layers (`tff_pdp.models.layers`). From those
cotangents come each example's norm, layer by layer in closed form, and then, scaled by the clip factors, each layer's
weight gradient from TensorFlow's own operations: no second backward pass through the network (Bu et al.,
"Differentially Private Optimization on Large Model at Small Cost", arXiv:2210.00038, ICML 2023).

Assumes: `predict` treats each example on its own, in the order of axis 0; no batch statistics.
"""

import collections
import dataclasses
import logging

import tensorflow as tf

from tff_pdp.models.base import Model, Weights, at_least_one_row
from tff_pdp.models.layers import RecordingWeights, Use

_logger = logging.getLogger(__name__)
_models_logged: set[str] = set()


def clipped_sum(
    model: Model,
    weights: Weights,
    x: tf.Tensor,
    y: tf.Tensor,
    *,
    clip_norm: tf.Tensor,
    included: tf.Tensor,
    pull: Weights | None = None,
) -> Weights:
    """Returns `sum_i included_i * min(1, clip_norm / |g_i|) * g_i`, with `g_i` the gradient of example i's loss.

    With an infinite clip, no pull and all examples included it is, to the bit, the gradient of the sum of the losses.

    Guarantee: each example moves the sum by at most `clip_norm` in L2 norm over all weights jointly, up to float32
      rounding. One that is not included moves it by exactly nothing, whatever its x and y hold; neither does one whose
      gradient is not finite, unless the clip is infinite too (then it must show).
    Assumes: as the module; weights are finite; the pull is no function of these examples, except through what has been
      released of them.

    Args:
      model: gives the loss of each example.
      weights: by name, float32.
      x: `[batch, ...]`; the batch may be empty.
      y: `[batch, ...]`; zero must be a label.
      clip_norm: float32 scalar, may be infinite.
      included: float32 `[batch]`, each 0 or 1.
      pull: of the structure of the weights; added to each example's gradient before it is clipped, as the gradient of a
        penalty would be that is part of every example's loss. `g_i` is then the sum. The norms take the gradient of one
        layer of all examples at a time.

    Returns:
      Tensors of the names, order and shapes of `weights`; zeros for those the losses do not reach.
    """
    x, y, included = at_least_one_row(x), at_least_one_row(y), at_least_one_row(included)
    # A loss may refuse a label that is none; whatever x holds is kept out of the sum below.
    y = _keep(included > 0, y)
    backward = _backward_to_layers(model, weights, x, y)
    norms = _norms_by_mapping(model, weights, x, y, pull) if backward is None else backward.norms(pull)
    unclipped = tf.logical_or(norms <= clip_norm, tf.math.is_inf(clip_norm))
    factors = included * tf.where(unclipped, 1.0, clip_norm / norms)
    if backward is None:
        gradients = _weighted_gradient(model, weights, x, y, factors)
    else:
        gradients = backward.weight_gradients(factors)
    total = collections.OrderedDict(
        (name, gradients[name] if name in gradients else tf.zeros_like(value)) for name, value in weights.items()
    )
    return total if pull is None else _add_pull(total, pull, factors)


def per_example_norms(model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the L2 norm over all weights of each example's gradient: float32 `[batch]`; arguments as `clipped_sum`.

    Assumes: as the module.
    """
    num_examples = tf.shape(y)[0]
    x, y = at_least_one_row(x), at_least_one_row(y)
    backward = _backward_to_layers(model, weights, x, y)
    norms = _norms_by_mapping(model, weights, x, y) if backward is None else backward.norms()
    return norms[:num_examples]


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The losses `[batch]`, each use of a layer, and the cotangent of each use's output."""

    losses: tf.Tensor
    uses: list[Use]
    cotangents: list[tf.Tensor]

    def norms(self, pull: Weights | None = None) -> tf.Tensor:
        pull = pull or {}
        squares = tf.add_n(
            [
                use.layer.squared_norms(
                    use.inputs, cotangent, *use.weights, pulls=[pull.get(name) for name in use.names]
                )
                for use, cotangent in zip(self.uses, self.cotangents, strict=True)
            ]
        )
        used = {name for use in self.uses for name in use.names}
        for name in pull:
            if name not in used:
                squares += tf.reduce_sum(tf.square(tf.cast(pull[name], tf.float64)))
        # The reshape changes nothing; it fails for a model whose layers do not see one example in each row.
        return tf.reshape(tf.cast(tf.sqrt(squares), tf.float32), tf.shape(self.losses))

    def weight_gradients(self, factors: tf.Tensor) -> dict[str, tf.Tensor]:
        """Gradient of `sum_i factors_i * loss_i`, of the weights that layers use."""
        # A factor of zero alone would let the infinities and NaNs of an example through: 0 * inf is NaN.
        kept = factors > 0
        gradients: dict[str, tf.Tensor] = {}
        for use, cotangent in zip(self.uses, self.cotangents, strict=True):
            scaled = _keep(kept, cotangent * _as_column(factors, cotangent))
            own = use.layer.weight_gradients(_keep(kept, use.inputs), scaled, *use.weights)
            gradients.update(zip(use.names, own, strict=True))
        return gradients


def _backward_to_layers(model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor) -> _Backward | None:
    """Runs the model forward and back to the outputs of its layers; None if they do not account for every weight."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = RecordingWeights(weights, tape)
        losses = model.loss(recording, x, y)
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
    outputs = [use.output for use in recording.uses]
    cotangents = tape.gradient(total, outputs, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return _Backward(losses, recording.uses, [tf.convert_to_tensor(cotangent) for cotangent in cotangents])


def _not_by_example(uses: list[Use], losses: tf.Tensor) -> list[str]:
    """Weights of layers whose rows cannot be the examples: there is a fixed number of them, unlike of the losses."""
    if losses.shape[0] is not None:
        return []
    return [name for use in uses if use.output.shape[0] is not None for name in use.names]


def _norms_by_mapping(
    model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor, pull: Weights | None = None
) -> tf.Tensor:
    """As `per_example_norms`, of gradients and pull, for any model: holds the gradients of all examples."""

    def norm(example: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        example_x, example_y = example
        gradient = _weighted_gradient(model, weights, example_x[tf.newaxis], example_y[tf.newaxis], tf.ones([1]))
        pulled = gradient if pull is None else {name: value + pull[name] for name, value in gradient.items()}
        return tf.linalg.global_norm(list(pulled.values()))

    return tf.vectorized_map(norm, (x, y))


def _weighted_gradient(model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor, factors: tf.Tensor) -> Weights:
    """Gradient of `sum_i factors_i * loss_i`; zero for weights the losses do not reach."""
    kept = factors > 0
    tensors = {name: tf.convert_to_tensor(value) for name, value in weights.items()}
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(tensors)
        losses = model.loss(tensors, _keep(kept, x), _keep(kept, y))
        total = tf.reduce_sum(tf.math.multiply_no_nan(losses, tf.where(kept, factors, 0.0)))
    gradients = tape.gradient(total, tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return collections.OrderedDict((name, tf.convert_to_tensor(gradients[name])) for name in weights)


def _add_pull(total: Weights, pull: Weights, factors: tf.Tensor) -> Weights:
    """Adds what the pull contributes through the examples that are kept."""
    share = tf.reduce_sum(tf.where(factors > 0, factors, 0.0))
    # A pull that is not finite contributes nothing through no examples.
    return collections.OrderedDict(
        (name, value + tf.math.multiply_no_nan(pull[name], share)) for name, value in total.items()
    )


def _keep(kept: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """`values [batch, ...]`, but zero for the examples that are not kept."""
    return tf.where(_as_column(kept, values), values, tf.zeros([], values.dtype))


def _as_column(per_example: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """`per_example [batch]` with the rank of `values [batch, ...]`."""
    return tf.reshape(per_example, [-1] + [1] * (values.shape.rank - 1))
