"""Runs unchanged TFF: `build_weighted_fed_avg` on tf.data clients, computed by the C++ worker in TFF's wheel.

Only the start of the worker is tff_pdp's (`running_engine`): it watches the process, and adds no step to a round.
"""

import collections
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from benchmarks.rounds import contender
from benchmarks.rounds.contenders.tf_models import batch_loss, predict
from benchmarks.rounds.workloads import FedAvgWorkload
from tff_pdp.engines.running import running_engine


def build(workload: FedAvgWorkload) -> contender.Rounds:
    """Builds TFF's federated averaging; with a clip norm, the unweighted form with TFF's own Gaussian mechanism."""
    return _Rounds(workload)


class _Rounds:
    def __init__(self, workload: FedAvgWorkload):
        self._workload = workload
        initial = workload.initial_weights()
        self._names = list(initial)
        model = _build_model(workload, tuple(initial.values()))
        client_optimizer = tff.learning.optimizers.build_sgdm(workload.learning_rate)
        server_optimizer = tff.learning.optimizers.build_sgdm(1.0)
        if workload.clip_norm is None:
            self._process = tff.learning.algorithms.build_weighted_fed_avg(model, client_optimizer, server_optimizer)
        else:
            mechanism = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
                noise_multiplier=workload.noise_multiplier,
                clients_per_round=workload.clients_per_round,
                clip=workload.clip_norm,
            )
            self._process = tff.learning.algorithms.build_unweighted_fed_avg(
                model, client_optimizer, server_optimizer, model_aggregator=mechanism
            )
        self._state = self._process.initialize()

    def prepare(self, round_number: int) -> Any:
        clients = [self._workload.client_data(client) for client in self._workload.cohort(round_number)]
        examples: list[Any] = [collections.OrderedDict(x=x, y=y) for x, y in clients]
        return [tf.data.Dataset.from_tensor_slices(e).batch(self._workload.batch_size) for e in examples]

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        self._state = self._process.next(self._state, prepared).state
        weights = self._process.get_model_weights(self._state).trainable
        return {name: np.asarray(weight) for name, weight in zip(self._names, weights, strict=True)}


def _build_model(workload: FedAvgWorkload, initial_weights: tuple[np.ndarray, ...]) -> Any:
    x, y = workload.client_data(0)

    @tf.function
    def predict_on_batch(model_weights: Any, x: Any, training: bool) -> Any:
        del training  # Neither model has a layer that depends on it.
        trainable, _ = model_weights
        return predict(workload.model, trainable, x)

    @tf.function
    def loss(output: Any, label: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        return batch_loss(output, label)

    return tff.learning.models.FunctionalModel(
        initial_weights=(initial_weights, ()),
        predict_on_batch_fn=predict_on_batch,
        loss_fn=loss,
        input_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, *x.shape[1:]], tf.float32), y=tf.TensorSpec([None, *y.shape[1:]], tf.int32)
        ),
    )


if __name__ == "__main__":
    with running_engine("native"):
        contender.main(build, ["tensorflow-federated", "tensorflow", "numpy"])
