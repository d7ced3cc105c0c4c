"""Checks that a model is a pure function of weights and examples, and that examples do not influence each other.

Clipping bounds what one example adds to a sum of gradients only if no other example's gradient changes with it. The
check changes some examples of a batch and compares the results of all others, to the last bit. A model may pass and
still mix examples for other inputs, so the check finds mistakes and proves nothing.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Model, Weights
from tff_pdp.models.dropout import RowDraws

# Whole blocks, for which TensorFlow's kernels treat all rows alike (`tff_pdp.privacy.mechanisms.per_example`).
_ROWS = 48
_CHANGED = (0, 17)
# Larger than the others: a largest value over the batch changes, too.
_SIZE_OF_CHANGED = 10.0
# Tolerance where the number of rows differs, and with it the order of additions.
_ROUNDING = 1e-4
# Operations that are marked as stateful but keep nothing: functions, whose bodies are looked at, and checks.
_HARMLESS = {"PartitionedCall", "StatefulPartitionedCall", "While", "If", "Case", "Placeholder", "Assert", "_Arg"}
_LOSS = "use a loss of each example by itself"


def check_model_treats_examples_apart(model: Model) -> None:
    """Checks a model on random examples; takes about a second for a small model.

    Raises:
      ConfigError: the model keeps state, draws random numbers by itself, or lets examples influence each other.
    """
    # Public numbers, with which nothing is protected.
    rng = np.random.default_rng(0)
    weights = {
        name: tf.constant(array + rng.normal(0, 0.05, array.shape).astype(np.float32))
        for name, array in model.init(0).items()
    }
    x, other_x = (_examples(model, weights, rng, size) for size in (1.0, _SIZE_OF_CHANGED))
    y, other_y = (_labels(model, rng) for _ in range(2))
    is_changed = np.isin(np.arange(_ROWS), _CHANGED)
    mixed_x = tf.constant(np.where(is_changed.reshape([-1] + [1] * len(model.input_shape)), other_x, x))
    mixed_y = tf.constant(np.where(is_changed, other_y, y))
    rows = np.arange(_ROWS, dtype=np.int64)
    draws, mixed_draws = (
        RowDraws(tf.constant([1, 2], tf.int64), tf.constant(own))
        for own in (rows, np.where(is_changed, rows + _ROWS, rows))
    )
    check_is_pure(model.name, lambda given: model.predict(weights, given), model)
    if model.training_predict is not None:
        training = model.training_predict
        check_is_pure(model.name, lambda given: training(weights, given, draws), model)
    others = tf.constant(~is_changed)
    before = _results(model, weights, tf.constant(x), tf.constant(y), draws, others)
    after = _results(model, weights, mixed_x, mixed_y, mixed_draws, others)
    for what, value in before.items():
        if not _equal_bits(value, after[what]):
            raise ConfigError(
                f"model {model.name}: {what} of an example change with other examples of the batch, so clipping does "
                "not bound what one example adds: leave out batch statistics and reductions over axis 0, and "
                f"{_LOSS}"
            )
    first = int(np.flatnonzero(~is_changed)[0])
    alone = model.loss(weights, tf.constant(x[first : first + 1]), tf.constant(y[first : first + 1]))
    if not np.allclose(alone, before["losses"][:1], rtol=_ROUNDING, atol=_ROUNDING):
        raise ConfigError(
            f"model {model.name}: the loss of an example is {float(before['losses'][0]):.6g} in a batch of {_ROWS} and "
            f"{float(alone[0]):.6g} alone: leave out divisions by the batch size, and {_LOSS}"
        )


def _results(
    model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor, draws: RowDraws, others: tf.Tensor
) -> dict[str, np.ndarray]:
    """Returns the results of the examples that are not changed, and the gradient of their losses."""
    watched = collections.OrderedDict(weights)
    with tf.GradientTape() as tape:
        tape.watch(list(watched.values()))
        losses = tf.boolean_mask(model.training_loss(watched, x, y, draws), others)
        total = tf.reduce_sum(losses)
    gradients: Any = tape.gradient(total, list(watched.values()), unconnected_gradients=tf.UnconnectedGradients.ZERO)
    found = {
        "outputs": tf.boolean_mask(model.predict(weights, x), others),
        "losses": tf.boolean_mask(model.loss(weights, x, y), others),
        "losses in training": losses,
    }
    gradient = np.concatenate([np.ravel(tf.convert_to_tensor(one)) for one in gradients])
    # Changed examples add zeros, which leave at most the order of additions to differ.
    scale = np.abs(gradient).max()
    rounded = np.round(gradient / scale, 4) + 0.0 if np.isfinite(scale) and scale > 0 else gradient
    return {**{what: value.numpy() for what, value in found.items()}, "gradients": rounded}


def _equal_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _examples(model: Model, weights: Weights, rng: np.random.Generator, size: float) -> np.ndarray:
    """Returns random examples of a standard deviation; zeros and ones for a model that takes ids only."""
    values = (size * rng.normal(size=(_ROWS, *model.input_shape))).astype(np.float32)
    try:
        model.predict(weights, tf.constant(values))
    except tf.errors.InvalidArgumentError:
        return rng.integers(0, 2, values.shape).astype(np.float32)
    return values


def _labels(model: Model, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.integers(0, model.num_classes, _ROWS) if model.num_classes else rng.normal(size=_ROWS)
    return drawn.astype(model.label_dtype)


def check_is_pure(name: str, predict: Callable[[tf.Tensor], tf.Tensor], model: Model) -> None:
    """Checks, by the graph of `predict`, that a model has no variables and draws no random numbers by itself.

    Raises:
      ConfigError: the graph has such an operation; the message names it.
    """
    held, operations = impurities(predict, model.input_shape)
    if held:
        raise ConfigError(
            f"model {name}: the prediction uses the variable {held[0]}, which is no weight, so the model keeps state "
            "between calls: make predict a function of weights and x alone"
        )
    if operations:
        raise ConfigError(
            f"model {name}: the prediction has the operation {operations[0]}, which draws random numbers, keeps state "
            "or leaves TensorFlow: draw dropout masks by tff_pdp.models.dropout in training_predict"
        )


def impurities(predict: Callable[[tf.Tensor], tf.Tensor], input_shape: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """Returns the names of variables, and the types of stateful operations, in the graph of `predict`."""
    traced = tf.function(predict, autograph=False).get_concrete_function(tf.TensorSpec([None, *input_shape]))
    captured = {id(handle) for handle, _ in traced.graph.captures if handle.dtype == tf.resource}
    named = [variable.name for variable in traced.graph.variables]
    # A table for look-ups, or what a generator keeps.
    held = named or ["without a name"] * len(captured)
    stateful = {kind for kind, is_stateful in _operations(traced.graph) if is_stateful and kind not in _HARMLESS}
    return held, sorted(stateful)


def _operations(graph: Any) -> Iterator[tuple[str, bool]]:
    """Lists types of operations, of a graph and of the functions that it calls, and whether they are stateful."""
    definition = graph.as_graph_def(add_shapes=False)
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    called = {function.signature.name for function in definition.library.function}
    for kind in sorted({node.op for node in nodes} - called):
        known = graph.op_def_for_type(kind)
        yield kind, bool(known.is_stateful)
