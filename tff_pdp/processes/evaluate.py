"""The computations that use trained state: each client's personal weights, and their metrics on held-out data."""

import collections
from typing import Any

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.algorithms.base import Algorithm, GradientEstimator
from tff_pdp.models.base import Model, Weights
from tff_pdp.models.batches import at_least_one_row
from tff_pdp.processes.client_work import build_adapt_work


def build_personalise(
    algorithm: Algorithm, server_state_type: Any, broadcast: _tff.Computation, state_type: Any
) -> _tff.Computation:
    """Builds `(server_state@SERVER, client_states@CLIENTS) -> weights@CLIENTS`, run on the client."""

    @_tff.tensorflow_computation(broadcast.type_signature.result, state_type)
    def personalise_one(message, state):
        return algorithm.personalise(message, state)

    @_tff.federated_computation(server_state_type, _tff.at_clients(state_type))
    def personalise(server_state, client_states):
        message = _tff.federated_broadcast(_tff.federated_map(broadcast, server_state["algorithm"]))
        return _tff.federated_map(personalise_one, (message, client_states))

    return personalise


def build_adapt(
    algorithm: Algorithm,
    estimator: GradientEstimator,
    server_state_type: Any,
    broadcast: _tff.Computation,
    state_type: Any,
    data_type: Any,
    params_type: Any,
) -> _tff.Computation:
    """Builds `(server_state@SERVER, client_states@CLIENTS, client_data@CLIENTS, client_params@CLIENTS) -> states`.

    What clients do for themselves with their own data, before their models are used. Nothing of it leaves them.
    """
    work = build_adapt_work(algorithm, estimator)

    @_tff.tensorflow_computation(broadcast.type_signature.result, state_type, data_type, params_type)
    def adapt_one(message, state, data, params):
        return work(message, state, data, params)

    @_tff.federated_computation(
        server_state_type, _tff.at_clients(state_type), _tff.at_clients(data_type), _tff.at_clients(params_type)
    )
    def adapt(server_state, client_states, client_data, client_params):
        message = _tff.federated_broadcast(_tff.federated_map(broadcast, server_state["algorithm"]))
        return _tff.federated_map(adapt_one, (message, client_states, client_data, client_params))

    return adapt


def build_evaluate(
    algorithm: Algorithm,
    model: Model,
    server_state_type: Any,
    broadcast: _tff.Computation,
    state_type: Any,
    data_type: Any,
) -> _tff.Computation:
    """Builds `(server_state@SERVER, client_states@CLIENTS, client_data@CLIENTS) -> metrics@CLIENTS`.

    The metrics are `personal` and, where the method has a shared model, `global`, each with `accuracy`
    (or `squared_error`) and `loss`, float32. They are exact functions of held-out data: not private, for simulation and
    for the silo itself.
    """
    server_type = broadcast.type_signature.parameter

    @_tff.tensorflow_computation(server_type)
    def global_weights(server):
        return algorithm.global_model(server) if algorithm.global_model else collections.OrderedDict()

    @_tff.tensorflow_computation(
        broadcast.type_signature.result, global_weights.type_signature.result, state_type, data_type
    )
    def evaluate_one(message, shared, state, data):
        # Without the conditional that training has for it, which could not be stacked here.
        data = {**data, "x": at_least_one_row(data["x"]), "y": at_least_one_row(data["y"])}
        metrics = collections.OrderedDict(personal=_metrics(model, algorithm.personalise(message, state), data))
        if algorithm.global_model:
            metrics["global"] = _metrics(model, shared, data)
        return metrics

    @_tff.federated_computation(server_state_type, _tff.at_clients(state_type), _tff.at_clients(data_type))
    def evaluate(server_state, client_states, client_data):
        message = _tff.federated_broadcast(_tff.federated_map(broadcast, server_state["algorithm"]))
        shared = _tff.federated_broadcast(_tff.federated_map(global_weights, server_state["algorithm"]))
        return _tff.federated_map(evaluate_one, (message, shared, client_states, client_data))

    return evaluate


def _metrics(model: Model, weights: Weights, data: Any) -> collections.OrderedDict[str, tf.Tensor]:
    own = tf.range(tf.shape(data["y"])[0]) < data["num_examples"]
    # Padding need not hold a label.
    labels = tf.where(own, data["y"], tf.zeros([], data["y"].dtype))
    # A client without held-out examples gives NaN, which the reader of the metrics leaves out and counts.
    size = tf.cast(data["num_examples"], tf.float32)
    return collections.OrderedDict(
        (name, tf.reduce_sum(tf.where(own, values, 0.0)) / size)
        for name, values in model.example_metrics(weights, data["x"], labels).items()
    )
