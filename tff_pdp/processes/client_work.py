"""What a client computes in a round, written once, for one client and for a stack of them."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientData, GradientEstimator, LocalSteps
from tff_pdp.privacy.selection import NOTHING, Selector
from tff_pdp.processes.vectorizable import vectorizable


def build_client_work(
    algorithm: Algorithm, estimator: GradientEstimator, selector: Selector | None = None, *, is_weighted: bool = False
) -> Callable[..., Any]:
    """Builds `(broadcast, client state, client data, client params) -> {state, released}`.

    The selector is for an algorithm with candidates. With weights, what a client releases counts `params["weight"]`
    times.

    Up to rounding, a client's result does not depend on who else is in the stack: what it draws comes from its own
    seed, and padding counts for nothing. (The stack is as wide as its largest batch, and sums over another width may
    round differently.)
    """

    def train(
        message: Any, state: Any, data: Any, params: Any, draws: Any, selected: tf.Tensor, bound: tf.Tensor
    ) -> Any:
        def grad_fn(weights, examples, index, scale, pull=None):
            return estimator.gradient(params["mechanism"], draws, weights, examples, index, scale, pull)

        steps = LocalSteps(params["hparams"]["local_steps"], bound)
        hparams = {**params["hparams"], "local_steps": steps, "selected": selected}
        result = algorithm.client_update(message, state, ClientData(**data), grad_fn, hparams)
        released = plain(result.released)
        if is_weighted:
            released = tf.nest.map_structure(lambda value: params["weight"] * value, released)
        return collections.OrderedDict(state=plain(result.state), released=released)

    def select(message: Any, data: Any, params: Any) -> tf.Tensor:
        if algorithm.candidates is None or selector is None:
            return tf.fill(tf.shape(data["num_examples"]), NOTHING)
        return selector(algorithm.candidates(message), data, params["selection_epsilon"], params["seed"])

    def for_one(message: Any, state: Any, data: Any, params: Any) -> Any:
        data = usable_rows(data, axis=0)
        stacked_data, stacked_params = tf.nest.map_structure(lambda leaf: leaf[tf.newaxis], (data, params))
        draws = _draw(algorithm, estimator, stacked_data, stacked_params)
        only = tf.nest.map_structure(lambda leaf: leaf[0], draws)
        selected = select(message, stacked_data, stacked_params)[0]
        return train(message, state, data, params, only, selected, params["hparams"]["local_steps"])

    def for_stack(message: Any, states: Any, data: Any, params: Any) -> Any:
        data = usable_rows(data, axis=1)
        draws = _draw(algorithm, estimator, data, params)
        selected = select(message, data, params)
        bound = tf.reduce_max(params["hparams"]["local_steps"])

        def train_one(own: tuple[Any, Any, Any, Any, Any]) -> Any:
            return train(message, *own, bound)

        return tf.vectorized_map(train_one, (states, data, params, draws, selected))

    return vectorizable(for_one, for_stack, num_shared=1)


def plain(state: Any) -> Any:
    """Mappings as OrderedDicts, the form TFF types keep the order of."""
    if isinstance(state, Mapping):
        return collections.OrderedDict((name, plain(value)) for name, value in state.items())
    return state


def usable_rows(data: Any, *, axis: int) -> Any:
    """The data with at least one row, and with zeros in the rows of clients that have no examples.

    Whoever has examples can point at one of them where a batch is not full; who has none would point at padding, and
    some operations fail, or worse, where there is no row at all. Copies nothing where all clients have examples.

    Args:
      data: of type `client_data_type`, or stacked.
      axis: of the rows; 0, or 1 for stacked clients.
    """
    rows = tf.shape(data["y"])[axis]
    # Not `==`, which compares identities in the graphs TFF builds.
    is_empty = tf.equal(data["num_examples"], 0)
    # A reduction over no axis, as the predicate of two conditionals, is one that TensorFlow's optimizer folds wrongly.
    is_any_empty = tf.reduce_any(is_empty) if axis else is_empty

    def prepare(values: tf.Tensor) -> tf.Tensor:
        unlike_rows = [1] * (values.shape.rank - axis)
        paddings = [[0, 0]] * axis + [[0, 1]] + [[0, 0]] * (values.shape.rank - axis - 1)
        values = tf.cond(
            is_any_empty,
            lambda: tf.where(tf.reshape(is_empty, [-1, *unlike_rows][1 - axis :]), tf.zeros([], values.dtype), values),
            lambda: values,
        )
        return tf.cond(rows > 0, lambda: values, lambda: tf.pad(values, paddings))

    return collections.OrderedDict(x=prepare(data["x"]), y=prepare(data["y"]), num_examples=data["num_examples"])


def _draw(algorithm: Algorithm, estimator: GradientEstimator, data: Any, params: Any) -> Any:
    """The draws of all clients of a stack."""
    return estimator.draw(
        params["mechanism"],
        data["num_examples"],
        tf.shape(data["y"])[1],
        params["hparams"]["local_steps"] * algorithm.data_passes,
        params["seed"],
    )
