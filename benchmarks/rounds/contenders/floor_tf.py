"""Runs the floor: the same arithmetic in bare TensorFlow, without a federated framework.

The floor has no engine, metrics, accounting or client selection. It shows how fast a round could be on this machine.
"""

import sys
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.rounds import contender
from benchmarks.rounds.contenders.tf_models import mean_loss
from benchmarks.rounds.workloads import FedAvgWorkload, MrMtlWorkload


def build(workload: Any) -> contender.Rounds:
    """Builds the fastest known form of each workload.

    Stacked clients are faster for the MLP. On a CPU, a loop over the clients is faster for the CNN, whose convolutions
    would have different kernels for every client.
    """
    if contender.needs_gpu():
        if not tf.config.list_physical_devices("GPU"):
            sys.exit("TensorFlow sees no GPU")
        # As all of tff_pdp does.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    if isinstance(workload, MrMtlWorkload):
        return _StackedSilos(workload)
    is_stacked = workload.model == "mlp" or contender.needs_gpu()
    return _StackedClients(workload) if is_stacked else _LoopedClients(workload)


class _FedAvg:
    def __init__(self, workload: FedAvgWorkload):
        self._workload = workload
        initial = workload.initial_weights()
        self._names = list(initial)
        self._weights = [tf.constant(value) for value in initial.values()]

    def _client_update(self, weights: list[Any], x: Any, y: Any) -> list[Any]:
        workload, current = self._workload, list(weights)
        for step in range(workload.local_steps):
            batch = slice(step * workload.batch_size, (step + 1) * workload.batch_size)
            with tf.GradientTape() as tape:
                tape.watch(current)
                loss = mean_loss(workload.model, current, x[batch], y[batch])
            gradients: Any = tape.gradient(loss, current)
            current = [w - workload.learning_rate * g for w, g in zip(current, gradients, strict=True)]
        update = [new - old for new, old in zip(current, weights, strict=True)]
        return update if workload.clip_norm is None else tf.clip_by_global_norm(update, workload.clip_norm)[0]

    def _apply(self, weights: list[Any], total: list[Any]) -> list[Any]:
        workload = self._workload
        if workload.clip_norm is not None:
            stddev = workload.clip_norm * workload.noise_multiplier
            total = [value + tf.random.normal(value.shape, stddev=stddev) for value in total]
        return [w + value / workload.clients_per_round for w, value in zip(weights, total, strict=True)]

    def _as_numpy(self) -> dict[str, np.ndarray]:
        return {name: weight.numpy() for name, weight in zip(self._names, self._weights, strict=True)}


class _StackedClients(_FedAvg):
    """Rounds with one graph per round, all clients at once."""

    def prepare(self, round_number: int) -> Any:
        clients = [self._workload.client_data(client) for client in self._workload.cohort(round_number)]
        return tuple(tf.constant(np.stack(arrays)) for arrays in zip(*clients, strict=True))

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        self._weights = self._round(self._weights, *prepared)
        return self._as_numpy()

    @tf.function
    def _round(self, weights: list[Any], x: Any, y: Any) -> list[Any]:
        updates = tf.vectorized_map(lambda client: self._client_update(weights, *client), (x, y))
        return self._apply(weights, [tf.reduce_sum(update, axis=0) for update in updates])


class _LoopedClients(_FedAvg):
    """Rounds with one graph per client."""

    def prepare(self, round_number: int) -> Any:
        clients = [self._workload.client_data(client) for client in self._workload.cohort(round_number)]
        return [(tf.constant(x), tf.constant(y)) for x, y in clients]

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        total = [tf.zeros_like(weight) for weight in self._weights]
        for x, y in prepared:
            total = self._add_client(self._weights, total, x, y)
        self._weights = self._finish(self._weights, total)
        return self._as_numpy()

    @tf.function
    def _add_client(self, weights: list[Any], total: list[Any], x: Any, y: Any) -> list[Any]:
        return [t + u for t, u in zip(total, self._client_update(weights, x, y), strict=True)]

    @tf.function
    def _finish(self, weights: list[Any], total: list[Any]) -> list[Any]:
        return self._apply(weights, total)


class _StackedSilos:
    """Rounds with one graph per round, all silos at once, padded to the largest silo and the most steps."""

    def __init__(self, workload: MrMtlWorkload):
        self._workload = workload
        silos = workload.silos()
        steps = workload.local_steps(silos.num_examples)
        rates = workload.sampling_rates(silos.num_examples)
        exists = np.arange(silos.x.shape[1]) < silos.num_examples[:, np.newaxis]
        # The bias is the weight of a feature that is always 1.
        x = np.concatenate([silos.x, exists[..., np.newaxis].astype(np.float32)], axis=-1)
        self._x, self._y = tf.constant(x), tf.constant(silos.y)
        # Half the squared error has the gradient residual * x; the gradient's norm is |residual| times the norm of x.
        self._x_norms = tf.constant(np.maximum(np.linalg.norm(x, axis=-1), 1e-12))
        # Padding is never drawn.
        self._rates = tf.constant(rates[:, np.newaxis] * exists)
        self._expected_batches = tf.constant((rates * silos.num_examples).astype(np.float32)[:, np.newaxis])
        self._active = [tf.constant((step < steps)[:, np.newaxis]) for step in range(steps.max())]
        self._weights = tf.zeros([len(x), x.shape[-1]])
        self._mean = tf.zeros([x.shape[-1]])

    def prepare(self, round_number: int) -> Any:
        return round_number

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        self._weights, self._mean = self._round(self._weights, self._mean)
        weights = self._weights.numpy()
        return {"kernel": weights[:, :-1], "bias": weights[:, -1]}

    @tf.function
    def _round(self, weights: Any, mean: Any) -> tuple[Any, Any]:
        workload, current = self._workload, weights
        for active in self._active:
            residuals = tf.linalg.matvec(self._x, current) - self._y
            factors = tf.minimum(1.0, workload.clip_norm / tf.maximum(tf.abs(residuals) * self._x_norms, 1e-12))
            drawn = tf.cast(tf.random.uniform(tf.shape(self._y)) < self._rates, tf.float32)
            total = tf.linalg.matvec(self._x, residuals * factors * drawn, transpose_a=True)
            noise = tf.random.normal(tf.shape(total), stddev=workload.clip_norm * workload.noise_multiplier)
            gradient = (total + noise) / self._expected_batches + workload.prox_weight * (current - mean)
            current = tf.where(active, current - workload.learning_rate * gradient, current)
        return current, mean + tf.reduce_mean(current - weights, axis=0)


if __name__ == "__main__":
    contender.main(build, ["tensorflow", "numpy"])
