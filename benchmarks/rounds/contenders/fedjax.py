"""Runs FedJAX: its federated averaging, its loop over clients, its default shuffling; on the newest JAX.

FedJAX 0.0.17 has no central DP: with a clip norm, FedJAX's `for_each_client` and clipping do the clients' part, and
this module adds the sum and the noise.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rounds import contender
from benchmarks.rounds.workloads import FedAvgWorkload

# FedJAX 0.0.17 still uses this name, which JAX has since moved.
if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree_util.tree_map

import fedjax
from fedjax.algorithms import fed_avg
from fedjax.core import tree_util


def build(workload: FedAvgWorkload) -> contender.Rounds:
    """Builds FedJAX's federated averaging, or a DP round from FedJAX's parts."""
    return _FedAvg(workload) if workload.clip_norm is None else _DpFedAvg(workload)


class _Rounds:
    def __init__(self, workload: FedAvgWorkload):
        self._workload = workload
        self._batches = fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch_size, num_epochs=1, seed=0)
        self._initial = {name: jnp.asarray(value) for name, value in workload.initial_weights().items()}

    def prepare(self, round_number: int) -> Any:
        keys = jax.random.split(jax.random.PRNGKey(round_number), self._workload.clients_per_round)
        cohort = self._workload.cohort(round_number)
        datasets = [fedjax.ClientDataset(dict(zip("xy", self._workload.client_data(c), strict=True))) for c in cohort]
        return list(zip(cohort, datasets, keys, strict=True))

    def _gradient(self, weights: Any, batch: Any, key: Any) -> Any:
        del key
        return jax.grad(_mean_loss, argnums=1)(self._workload.model, weights, batch["x"], batch["y"])


class _FedAvg(_Rounds):
    def __init__(self, workload: FedAvgWorkload):
        super().__init__(workload)
        self._algorithm = fed_avg.federated_averaging(
            self._gradient,
            fedjax.optimizers.sgd(workload.learning_rate),
            fedjax.optimizers.sgd(1.0),
            self._batches,
        )
        self._state = self._algorithm.init(self._initial)

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        self._state, _ = self._algorithm.apply(self._state, prepared)
        return jax.device_get(self._state.params)


class _DpFedAvg(_Rounds):
    def __init__(self, workload: FedAvgWorkload):
        super().__init__(workload)
        optimizer = fedjax.optimizers.sgd(workload.learning_rate)
        self._train = fed_avg.create_train_for_each_client(self._gradient, optimizer)
        self._weights, self._key = self._initial, jax.random.PRNGKey(0)

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        clients = [(name, data.shuffle_repeat_batch(self._batches), key) for name, data, key in prepared]
        # FedJAX's updates are old weights minus new weights.
        clipped = (
            tree_util.tree_clip_by_global_norm(update, self._workload.clip_norm)
            for _, update in self._train(self._weights, clients)
        )
        self._key, noise_key = jax.random.split(self._key)
        self._weights = self._finish(self._weights, tree_util.tree_sum(clipped), noise_key)
        return jax.device_get(self._weights)

    def _finish(self, weights: Any, total: Any, key: Any) -> Any:
        stddev = self._workload.clip_norm * self._workload.noise_multiplier
        return _subtract_noisy_mean(weights, total, key, stddev, self._workload.clients_per_round)


@jax.jit
def _subtract_noisy_mean(weights: Any, total: Any, key: Any, stddev: float, clients_per_round: int) -> Any:
    keys = dict(zip(weights, jax.random.split(key, len(weights)), strict=True))
    return {
        name: weight - (total[name] + stddev * jax.random.normal(keys[name], weight.shape)) / clients_per_round
        for name, weight in weights.items()
    }


def _mean_loss(model: str, weights: Any, x: Any, y: Any) -> Any:
    if model == "cnn":
        for layer in ("conv_0", "conv_1"):
            x = jax.lax.conv_general_dilated(
                x, weights[f"{layer}/kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + weights[f"{layer}/bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(len(x), -1)
    hidden = jax.nn.relu(x @ weights["dense_0/kernel"] + weights["dense_0/bias"])
    logits = hidden @ weights["dense_1/kernel"] + weights["dense_1/bias"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, jnp.newaxis], axis=-1))


if __name__ == "__main__":
    contender.main(build, ["fedjax", "jax", "jaxlib", "numpy"])
