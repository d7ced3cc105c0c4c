"""Parts a training into two phases: rounds on synthetic data by any method, then rounds on clients' own records.

In the first phase a method trains as usual, but on data that were released before, so that its rounds cost no budget.
In the second phase each client trains a model of its own on its records, and nothing leaves the client. Both phases
keep the same states, so that a round's number alone decides the computation of the round.

Source: "Personalized Privacy-Preserving Framework for Cross-Silo Federated Learning" (PPPFL), with adaptation by
DP-SGD where the paper trains on records without noise.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, Export, Traffic, choose
from tff_pdp.algorithms.hyper_parameters import HParam, Steps
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.errors import ConfigError

# Hyper-parameters of the second phase, in addition to the method's own.
ADAPTATION: Mapping[str, HParam] = {
    "adaptation_learning_rate": HParam(
        0.5, "learning rate of the adaptation to records", symbol="η_a", unit="weight² per loss"
    ),
    "adaptation_steps": Steps(10, "length of a client's round of adaptation", symbol="τ_a"),
}


class Phases(NamedTuple):
    """The two algorithms of a training in two phases, with states of the same types.

    Attributes:
      federated: the method, for rounds on synthetic data.
      adaptation: training of each client's own model on its records; releases nothing.
    """

    federated: Algorithm
    adaptation: Algorithm


def reads_records_by_itself(algorithm: Algorithm) -> bool:
    """Returns whether a method adapts models to records, or selects models by records, in a way of its own.

    Such a method cannot train on synthetic data.
    """
    return algorithm.adapt is not None or algorithm.candidates is not None


def in_phases(algorithm: Algorithm, *, federated_rounds: int, num_clients: int) -> Phases:
    """Builds both phases of a method. Client state: the method's own, the client's weights, and whether it has any.

    Args:
      algorithm: a method for silos.
      federated_rounds: number of rounds of the first phase, which is at least 1.
      num_clients: number of all clients.

    Raises:
      ConfigError: the method adapts models to records, or selects models by records, in a way of its own.
    """
    if reads_records_by_itself(algorithm):
        raise ConfigError(
            f"algorithms.{algorithm.name} reads clients' records in a way of its own, "
            f"{'to adapt' if algorithm.adapt is not None else 'to select'} models, and so cannot train on synthetic "
            "data: leave out privacy.synthetic, or use another method"
        )
    start_of = algorithm.adaptation_start or algorithm.personalise

    def init_client(broadcast):
        own = algorithm.init_client(broadcast)
        return {"method": own, "weights": start_of(broadcast, own), "is_adapted": tf.constant(False)}

    def personalise(broadcast, client_state):
        shared = algorithm.personalise(broadcast, client_state["method"])
        return choose(client_state["is_adapted"], client_state["weights"], shared)

    def federated_update(broadcast, client_state, data, grad_fn, hparams):
        result = algorithm.client_update(broadcast, client_state["method"], data, grad_fn, hparams)
        return ClientResult(state={**client_state, "method": result.state}, released=result.released)

    def adaptation_update(broadcast, client_state, data, grad_fn, hparams):
        start = choose(client_state["is_adapted"], client_state["weights"], start_of(broadcast, client_state["method"]))
        weights = local_sgd(start, data, grad_fn, hparams["adaptation_learning_rate"], hparams["adaptation_steps"])
        state = {"method": client_state["method"], "weights": weights, "is_adapted": tf.constant(True)}
        return ClientResult(state=state, released={})

    def adaptation_traffic(server_state, round_number):
        """Counts the shared values that clients receive once, after the last update of the shared model."""
        message = algorithm.broadcast(server_state) if round_number == federated_rounds + 1 else {}
        received = sum(np.size(value) for value in tf.nest.flatten(dict(message)))
        return Traffic(np.zeros(num_clients), np.full(num_clients, float(received)))

    federated = dataclasses.replace(
        algorithm,
        init_client=init_client,
        client_update=federated_update,
        personalise=personalise,
        adaptation_start=None,
        # An adapted model is a client's own.
        export=Export(),
        # A client that missed the last rounds would never adapt.
        needs_everyone=True,
    )
    adaptation = dataclasses.replace(
        federated,
        hparams=dict(ADAPTATION),
        released={},
        data_passes=1,
        client_update=adaptation_update,
        server_update=lambda state, aggregates: state,
        public={},
        public_values=None,
        hook=None,
        needs_plain_gradients=False,
        traffic=adaptation_traffic,
    )
    return Phases(federated, adaptation)
