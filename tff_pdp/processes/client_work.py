"""Builds a client's computation in a round, for one client and for a stack of clients.

A dry round, without data and without TFF, shows which values clients store or release, and which of these values differ
between clients.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import (
    Algorithm,
    ClientData,
    ClientResult,
    GradFn,
    GradientEstimator,
    State,
    map_weights,
    split,
)
from tff_pdp.algorithms.hyper_parameters import LocalSteps, Steps, count_gradients, step_names
from tff_pdp.models.base import Model, Weights, pad
from tff_pdp.privacy.mechanisms.selection import NOTHING, Selector
from tff_pdp.processes.vectorizable import map_stack, vectorizable


def build_client_work(
    algorithm: Algorithm, estimator: GradientEstimator, selector: Selector | None = None, *, is_weighted: bool = False
) -> Callable[..., Any]:
    """Builds `(broadcast, client state, client data, client params) -> {state, released}`.

    Up to rounding, a client's result does not depend on the other clients of the stack: each client draws from its own
    seed, and padding has no effect. Rounding may depend on the other clients, because all batches are padded to the
    size of the stack's largest batch, and sums over another size may be rounded differently.

    Args:
      algorithm: algorithm whose `client_update` is run.
      estimator: estimator of gradients.
      selector: private selector, for an algorithm with candidates.
      is_weighted: whether to multiply a client's releases, except rows, by `params["weight"]`.
    """

    def train(own: _Own, message: Any, state: Any, grad_fn: GradFn) -> Any:
        result = algorithm.client_update(message, state, own.data, grad_fn, own.hparams)
        released = plain(result.released)
        if is_weighted:
            # A row belongs to one client, and is never weighted.
            released = collections.OrderedDict(
                (name, value if algorithm.released[name] == "rows" else _times(own.params["weight"], value))
                for name, value in released.items()
            )
        return collections.OrderedDict(state=plain(result.state), released=released)

    def select(message: Any, data: Any, params: Any) -> tf.Tensor:
        if algorithm.candidates is None or selector is None:
            return _select_nothing(message, data, params)
        return selector(algorithm.candidates(message), data, params["selection_epsilon"], params["seed"])

    return _build(estimator, algorithm.step_hparams, algorithm.num_gradients, train, select)


def build_adapt_work(algorithm: Algorithm, estimator: GradientEstimator) -> Callable[..., Any]:
    """Builds `(broadcast, client state, client data, client params) -> adapted state`, for methods with `adapt`."""
    adapt: Any = algorithm.adapt

    def work(own: _Own, message: Any, state: Any, grad_fn: GradFn) -> Any:
        return plain(adapt(message, state, own.data, grad_fn, own.hparams))

    def num_gradients(hparams: Any) -> Any:
        return count_gradients(algorithm.hparams, hparams, in_adapt=True)

    return _build(estimator, step_names(algorithm.hparams, in_adapt=True), num_gradients, work, _select_nothing)


def _select_nothing(message: Any, data: Any, params: Any) -> tf.Tensor:
    return tf.fill(tf.shape(data["num_examples"]), NOTHING)


class _Own(NamedTuple):
    """A client's own values in a round: examples, parameters, and hyper-parameters in the form that algorithms get."""

    data: ClientData
    params: Any
    hparams: dict[str, Any]


def _build(
    estimator: GradientEstimator,
    step_hparams: Sequence[str],
    num_gradients: Callable[[Any], Any],
    work: Callable[[_Own, Any, Any, GradFn], Any],
    select: Callable[[Any, Any, Any], tf.Tensor],
) -> Callable[..., Any]:
    """Builds the computation of clients that estimate gradients, for one client and for a stack."""

    def run(message: Any, state: Any, data: Any, params: Any, draws: Any, selected: tf.Tensor, bounds: Any) -> Any:
        def grad_fn(weights, examples, index, scale, pull=None, trainable=None):
            return estimator.gradient(params["mechanism"], draws, weights, examples, index, scale, pull, trainable)

        steps = {name: LocalSteps(params["hparams"][name], bounds[name]) for name in step_hparams}
        hparams = {**params["hparams"], **steps, "selected": selected}
        return work(_Own(ClientData(**data), params, hparams), message, state, grad_fn)

    def draw(data: Any, params: Any) -> Any:
        """Returns the random draws of all clients of a stack."""
        num_steps = num_gradients(params["hparams"])
        return estimator.draw(
            params["mechanism"], data["num_examples"], tf.shape(data["y"])[1], num_steps, params["seed"]
        )

    def for_one(message: Any, state: Any, data: Any, params: Any) -> Any:
        data = usable_rows(data, axis=0)
        stacked_data, stacked_params = tf.nest.map_structure(lambda leaf: leaf[tf.newaxis], (data, params))
        only = tf.nest.map_structure(lambda leaf: leaf[0], draw(stacked_data, stacked_params))
        selected = select(message, stacked_data, stacked_params)[0]
        return run(message, state, data, params, only, selected, params["hparams"])

    def for_stack(message: Any, states: Any, data: Any, params: Any) -> Any:
        data = usable_rows(data, axis=1)
        draws = draw(data, params)
        selected = select(message, data, params)
        bounds = {name: tf.reduce_max(params["hparams"][name]) for name in step_hparams}

        def run_one(own: tuple[Any, Any, Any, Any, Any]) -> Any:
            return run(message, *own, bounds)

        # The guarantee of DP-SGD counts each rounding as it is written.
        return map_stack(run_one, (states, data, params, draws, selected), may_compile=estimator.is_plain)

    return vectorizable(for_one, for_stack, num_shared=1)


def build_public_work(algorithm: Algorithm, *, is_weighted: bool = False) -> Callable[[Any], Any]:
    """Builds `client params -> public scalars` (float32, by name), which depends on hyper-parameters alone.

    With `is_weighted`, a client's scalars are multiplied by `params["weight"]`.
    """
    public_values: Any = algorithm.public_values

    def work(params: Any) -> Any:
        steps = {name: LocalSteps(params["hparams"][name], params["hparams"][name]) for name in algorithm.step_hparams}
        values = public_values({**params["hparams"], **steps})
        scalars = collections.OrderedDict((name, tf.cast(values[name], tf.float32)) for name in algorithm.public)
        return _times(params["weight"], scalars) if is_weighted else scalars

    return work


def _times(weight: tf.Tensor, nest: Any) -> Any:
    return tf.nest.map_structure(lambda value: weight * value, nest)


def plain(state: Any) -> Any:
    """Converts mappings to OrderedDicts, whose order TFF types keep."""
    if isinstance(state, Mapping):
        return collections.OrderedDict((name, plain(value)) for name, value in state.items())
    return state


def usable_rows(data: Any, *, axis: int) -> Any:
    """Returns client data with at least one row, and with zeros in the rows of clients that have no examples.

    Without rows, some operations fail or return wrong results. Without zeros, batches of a client that has no examples
    would be filled with padding, whose values are arbitrary. Nothing is copied if all clients have examples.

    Args:
      data: client data of type `client_data_type`, or stacked.
      axis: axis of the rows: 0 for one client, 1 for stacked clients.
    """
    rows = tf.shape(data["y"])[axis]
    # Not `==`, which compares identities in the graphs TFF builds.
    is_empty = tf.equal(data["num_examples"], 0)
    # TensorFlow's optimizer wrongly folds a reduction over no axis that is the predicate of two conditionals.
    is_any_empty = tf.reduce_any(is_empty) if axis else is_empty

    def prepare(values: tf.Tensor) -> tf.Tensor:
        unlike_rows = [1] * (values.shape.rank - axis)
        paddings = [[0, 0]] * axis + [[0, 1]] + [[0, 0]] * (values.shape.rank - axis - 1)
        values = tf.cond(
            is_any_empty,
            lambda: tf.where(tf.reshape(is_empty, [-1, *unlike_rows][1 - axis :]), tf.zeros([], values.dtype), values),
            lambda: values,
        )
        return tf.cond(rows > 0, lambda: values, lambda: pad(values, paddings))

    return collections.OrderedDict(x=prepare(data["x"]), y=prepare(data["y"]), num_examples=data["num_examples"])


def initial_weights(model: Model, seed: int = 0) -> Weights:
    """Returns the model's initial weights as tensors, drawn from `seed`."""
    return collections.OrderedDict((name, tf.constant(array)) for name, array in model.init(seed).items())


class Owned(NamedTuple):
    """Names of the values that differ between clients; the name of a nested value is its keys, joined by slashes.

    Attributes:
      states: names in client states, after adaptation.
      weights: names of model weights.
    """

    states: tuple[str, ...]
    weights: tuple[str, ...]


def what_clients_own(algorithm: Algorithm, model: Model, rounds: int) -> Owned:
    """Finds the values that differ between clients, by a dry round with different gradients and selections.

    The dry round is the last of `rounds` rounds, because some methods train a shared model in earlier rounds.
    """
    server = dict(algorithm.init_server(initial_weights(model)))
    if "round" in server:
        server["round"] = tf.constant(rounds - 1)
    message = algorithm.broadcast(server)
    states = [dry_round(algorithm, message, model, client, adapted=True).state for client in (0, 1)]
    weights = [algorithm.personalise(message, state) for state in states]
    return Owned(_differing(states[0], states[1]), _differing(weights[0], weights[1]))


def _differing(one: Any, other: Any, name: str = "") -> tuple[str, ...]:
    if isinstance(one, Mapping):
        return tuple(found for key in one for found in _differing(one[key], other[key], f"{name}/{key}".lstrip("/")))
    return (name,) if np.any(np.asarray(one) != np.asarray(other)) else ()


def dry_round(
    algorithm: Algorithm, message: State, model: Model, client: int | None = None, *, adapted: bool = False
) -> ClientResult:
    """Computes a dry round: the state and releases of a new client without examples, from constant gradients.

    Args:
      algorithm: algorithm of the client.
      message: message that the server broadcasts.
      model: model that the client trains.
      client: number of the candidate that the client selects; every entry of the gradients is this number plus one.
        With None, the client selects no candidate, and all gradients are zero.
      adapted: whether to return the state after `Algorithm.adapt`, if the algorithm has this method.
    """
    once = LocalSteps(tf.constant(1), tf.constant(1))
    hparams: dict[str, Any] = {
        name: tf.constant(np.asarray(one.default, one.dtype)) for name, one in algorithm.hparams.items()
    }
    hparams |= {name: once for name, one in algorithm.hparams.items() if isinstance(one, Steps)}
    labels = tf.constant(np.zeros(0, model.label_dtype))
    nothing = ClientData(tf.zeros([0, *model.input_shape]), labels, tf.constant(0))

    def same_everywhere(current, data, index, scale, pull=None, trainable=None):
        size = 0.0 if client is None else scale * (1.0 + client)
        return map_weights(lambda value: tf.zeros_like(value) + size, split(current, trainable or current)[0])

    selected = NOTHING if client is None or algorithm.candidates is None else client
    given = {**hparams, "selected": tf.constant(selected)}
    result = algorithm.client_update(message, algorithm.init_client(message), nothing, same_everywhere, given)
    if adapted and algorithm.adapt is not None:
        return result._replace(state=algorithm.adapt(message, result.state, nothing, same_everywhere, given))
    return result


def num_released(algorithm: Algorithm, model: Model) -> int:
    """Returns the number of scalars that a client releases in a round."""
    message = algorithm.broadcast(algorithm.init_server(initial_weights(model)))
    released = dry_round(algorithm, message, model).released
    return sum(int(tf.size(value)) for value in tf.nest.flatten(dict(released)))
