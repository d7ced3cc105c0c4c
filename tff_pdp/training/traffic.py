"""Counts the bytes that real clients would send and receive in a training."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Traffic
from tff_pdp.experiment.method import Method
from tff_pdp.processes.client_work import initial_weights, num_released

_BYTES_PER_VALUE = 4


class TrafficCount:
    """Counts a training's bytes, round by round.

    The bytes are those of a deployment. A simulation sends messages of one type to all clients, whatever each needs.

    Args:
      method: the method that is trained.
    """

    def __init__(self, method: Method):
        self._method = method
        self._rounds, self._uplink, self._downlink = 0, 0, 0

    def through(self, server_state: Mapping[str, Any], round_number: int) -> dict[str, int]:
        """Returns facts for a row of metrics: the bytes of one round, and of all rounds up to that round.

        For silos, whose presence follows from public parameters, the bytes are sums over the silos that take part. For
        users, the result has only the bytes of one user in one round, because a sum would reveal the size of a sample.

        Args:
          server_state: the algorithm's state at the server after the round.
          round_number: number of the round, from 1; not below that of an earlier call.
        """
        if self._method.plan.samples_clients:
            one = self._in_round(server_state, round_number)
            sent, received = _bytes(one.uplink[:1]), _bytes(one.downlink[:1])
            return {"uplink_bytes_per_user": sent, "downlink_bytes_per_user": received}
        sent = received = 0
        for number in range(self._rounds + 1, round_number + 1):
            each = self._in_round(server_state, number)
            present = self._method.plan.cohort(number, self._method.clients.client_ids, _no_draws)
            sent, received = _bytes(each.uplink[present]), _bytes(each.downlink[present])
            self._uplink, self._downlink = self._uplink + sent, self._downlink + received
        self._rounds = round_number
        return {
            "uplink_bytes": sent,
            "downlink_bytes": received,
            "total_uplink_bytes": self._uplink,
            "total_downlink_bytes": self._downlink,
        }

    def _in_round(self, server_state: Mapping[str, Any], round_number: int) -> Traffic:
        own = self._method.at(round_number).algorithm.traffic
        return self._by_types if own is None else own(server_state, round_number)

    @functools.cached_property
    def _by_types(self) -> Traffic:
        """The traffic of a method whose clients all receive the broadcast and send their releases."""
        algorithm, model = self._method.at(1).algorithm, self._method.model
        message = algorithm.broadcast(algorithm.init_server(initial_weights(model)))
        received = sum(int(tf.size(value)) for value in tf.nest.flatten(dict(message)))
        clients = len(self._method.clients.client_ids)
        sent = num_released(algorithm, model)
        return Traffic(np.full(clients, float(sent)), np.full(clients, float(received)))


def _no_draws(number: int) -> Any:
    raise ValueError(f"the silos of a round are not drawn, so draws {number} are not needed")


def _bytes(values: np.ndarray) -> int:
    return int(_BYTES_PER_VALUE * np.sum(values))
