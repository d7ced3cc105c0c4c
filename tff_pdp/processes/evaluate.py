"""Builds the computation that evaluates personal and shared weights on held-out data."""

import collections
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.models.base import Model, Weights, at_least_one_row
from tff_pdp.models.metrics import Ranking
from tff_pdp.processes.vectorizable import map_stack, vectorizable


def build_evaluate(
    algorithm: Algorithm,
    model: Model,
    server_state_type: Any,
    broadcast: _tff.Computation,
    state_type: Any,
    data_type: Any,
) -> _tff.Computation:
    """Builds `(server_state@SERVER, client_states@CLIENTS, client_data@CLIENTS) -> metrics@CLIENTS`.

    The metrics have a part `personal` and, if the method has a shared model, a part `global`. Each part has `accuracy`
    (or `squared_error`) and `loss`, float32, and the model's ranking metric, if any. Metrics are exact functions of
    held-out data, hence not private: use metrics only in simulations, or within the silo.
    """
    server_type = broadcast.type_signature.parameter

    @_tff.tensorflow_computation(server_type)
    def global_weights(server):
        return algorithm.global_model(server) if algorithm.global_model else collections.OrderedDict()

    def measure(message: Any, shared: Any, state: Any, data: Any) -> Any:
        # Not by `usable_rows`, as in training: its conditional cannot be stacked here.
        data = {**data, "x": at_least_one_row(data["x"]), "y": at_least_one_row(data["y"])}
        measured = collections.OrderedDict(personal=_measure(model, algorithm.personalise(message, state), data))
        if algorithm.global_model:
            measured["global"] = _measure(model, shared, data)
        return measured

    measure_and_rank = measure if model.ranking is None else _with_ranking(measure, model.ranking)

    @_tff.tensorflow_computation(
        broadcast.type_signature.result, global_weights.type_signature.result, state_type, data_type
    )
    def evaluate_one(message, shared, state, data):
        return measure_and_rank(message, shared, state, data)

    @_tff.federated_computation(server_state_type, _tff.at_clients(state_type), _tff.at_clients(data_type))
    def evaluate(server_state, client_states, client_data):
        message = _tff.federated_broadcast(_tff.federated_map(broadcast, server_state["algorithm"]))
        shared = _tff.federated_broadcast(_tff.federated_map(global_weights, server_state["algorithm"]))
        return _tff.federated_map(evaluate_one, (message, shared, client_states, client_data))

    return evaluate


def _measure(model: Model, weights: Weights, data: Any) -> collections.OrderedDict[str, Any]:
    """Returns the means over a client's examples and, under a ranking's name, the arguments of its metric."""
    own = tf.range(tf.shape(data["y"])[0]) < data["num_examples"]
    # Padding may hold any label.
    labels = tf.where(own, data["y"], tf.zeros([], data["y"].dtype))
    # A client without held-out examples gives NaN; readers of the metrics leave out and count such clients.
    size = tf.cast(data["num_examples"], tf.float32)
    outputs = model.predict(weights, data["x"])
    measured: collections.OrderedDict[str, Any] = collections.OrderedDict(
        (name, tf.reduce_sum(tf.where(own, values, 0.0)) / size)
        for name, values in model.output_metrics(outputs, labels).items()
    )
    if model.ranking is not None:
        measured[model.ranking.metric.example_name] = (model.scores(outputs), labels, own)
    return measured


def _with_ranking(measure: Callable[..., Any], ranking: Ranking) -> Callable[..., Any]:
    """Returns `measure` for one client, with the ranking's metric in place of the metric's arguments.

    Stacks of clients have a separate form: `tf.vectorized_map` cannot sort, but one sort serves a whole stack.
    """
    name = ranking.metric.example_name

    def rank(measured: Any) -> Any:
        return collections.OrderedDict(
            (kind, collections.OrderedDict({**own, name: ranking.figure(*own[name])})) for kind, own in measured.items()
        )

    def for_one(message: Any, shared: Any, state: Any, data: Any) -> Any:
        return rank(measure(message, shared, state, data))

    def for_stack(message: Any, shared: Any, states: Any, data: Any) -> Any:
        return rank(map_stack(lambda own: measure(message, shared, *own), (states, data)))

    return vectorizable(for_one, for_stack, num_shared=2)
