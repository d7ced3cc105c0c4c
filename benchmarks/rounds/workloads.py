"""What the contenders are timed on: models' sizes, hyperparameters, and data that are the same in every process.

NumPy only: every contender's environment imports this module. All arrays are float32 and labels int32; the same
arguments give the same arrays everywhere, which the check round verifies.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

from benchmarks import school

Weights = dict[str, np.ndarray]
_SEED = 20230815


class Workload(Protocol):
    """What the orchestrator needs to know of any workload."""

    name: str
    clients_per_round: int
    population: int

    @property
    def repetitions(self) -> int:
        """How many rounds are recorded unless the user says otherwise."""
        ...

    @property
    def data_source(self) -> str:
        """Which data the workload uses on this machine."""
        ...

    @property
    def update_noise_std(self) -> float | None:
        """The standard deviation of the noise in each weight of one round's update, where that can be checked."""
        ...


@dataclasses.dataclass(frozen=True)
class FedAvgWorkload:
    """Federated averaging of an image classifier; with a clip norm, with user-level central DP.

    A round: each client of the cohort runs one epoch of SGD over its examples from the server's weights, its update is
    clipped to `clip_norm` (L2, over all weights jointly), noise of standard deviation `noise_multiplier * clip_norm` is
    added to the sum of the updates, and the sum over `clients_per_round` is added to the server's weights.
    """

    name: str
    model: Literal["cnn", "mlp"]
    clients_per_round: int = 20
    population: int = 200
    examples_per_client: int = 50
    batch_size: int = 10
    learning_rate: float = 0.1
    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    num_classes: int = 62
    identical_examples: bool = False

    @property
    def repetitions(self) -> int:
        """Rounds recorded by default."""
        return {"cnn": 5, "mlp": 9}[self.model]

    @property
    def data_source(self) -> str:
        """Always synthetic."""
        return "synthetic"

    @property
    def local_steps(self) -> int:
        """SGD steps of one client in one round."""
        return self.examples_per_client // self.batch_size

    @property
    def update_noise_std(self) -> float | None:
        """The noise that DP adds to each weight of a round's update; None without DP."""
        return None if self.clip_norm is None else self.clip_norm * self.noise_multiplier / self.clients_per_round

    def for_check(self) -> "FedAvgWorkload":
        """The same work without chance: no noise, and a client's examples all equal, so that their order is no matter.

        The clip stays: it is part of what is checked.
        """
        return dataclasses.replace(self, noise_multiplier=0.0, identical_examples=True)

    def initial_weights(self) -> Weights:
        """Glorot-uniform kernels and zero biases, in the order of the layers.

        Convolution kernels are `[height, width, inputs, outputs]`, dense kernels `[inputs, outputs]`; an image is
        flattened row by row with its channels last.
        """
        rng = np.random.default_rng(_SEED)
        weights: Weights = {}
        for layer, shape in _KERNELS[self.model].items():
            fan_in, fan_out = np.prod(shape[:-1]), np.prod(shape[:-2]) * shape[-1]
            limit = np.sqrt(6.0 / (fan_in + fan_out))
            weights[f"{layer}/kernel"] = rng.uniform(-limit, limit, shape).astype(np.float32)
            weights[f"{layer}/bias"] = np.zeros(shape[-1], np.float32)
        return weights

    def cohort(self, round_number: int) -> list[int]:
        """The clients of a round, drawn uniformly without replacement: the same for every contender."""
        rng = np.random.default_rng([_SEED, round_number])
        return rng.choice(self.population, self.clients_per_round, replace=False).tolist()

    def client_data(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's images, float32 `[examples, 784]` or `[examples, 28, 28, 1]` in [0, 1], and labels, int32.

        An image is its class's prototype under as much noise: enough of a task that weights stay finite.
        """
        prototypes = np.random.default_rng(_SEED).random((self.num_classes, 784), np.float32)
        rng = np.random.default_rng([_SEED, 1, client])
        y = rng.integers(self.num_classes, size=self.examples_per_client).astype(np.int32)
        x = (prototypes[y] + rng.random((self.examples_per_client, 784), np.float32)) / 2
        if self.identical_examples:
            x, y = np.broadcast_to(x[:1], x.shape).copy(), np.broadcast_to(y[:1], y.shape).copy()
        return (x.reshape(-1, 28, 28, 1) if self.model == "cnn" else x), y


_KERNELS = {
    # Convolutions without padding and one 2x2 max-pooling: 28 -> 26 -> 24 -> 12.
    "cnn": {"conv_0": (3, 3, 1, 32), "conv_1": (3, 3, 32, 64), "dense_0": (12 * 12 * 64, 128), "dense_1": (128, 62)},
    "mlp": {"dense_0": (784, 200), "dense_1": (200, 62)},
}


@dataclasses.dataclass(frozen=True)
class MrMtlWorkload:
    """MR-MTL with example-level DP-SGD in every silo: linear regression on School.

    A round: every silo runs `n // batch_size` steps (at least one) from its own weights. A step draws each of the
    silo's n examples with probability `batch_size / n`, clips each gradient of half the squared error to `clip_norm`
    (L2, kernel and bias jointly), adds noise of standard deviation `noise_multiplier * clip_norm` to the sum, divides
    by the expected batch size, adds `prox_weight * (weights - mean)`, and moves by `-learning_rate` times that. The
    mean then moves by the unweighted average of the silos' movements.
    """

    name: str
    clients_per_round: int = 139
    population: int = 139
    batch_size: int = 32
    learning_rate: float = 0.01
    clip_norm: float = 1.0
    noise_multiplier: float = 4.0
    prox_weight: float = 1.0
    full_batches: bool = False

    @property
    def repetitions(self) -> int:
        """Rounds recorded by default."""
        return 25

    @property
    def data_source(self) -> str:
        """`School` where the real file is at hand and fits, `synthetic` otherwise."""
        return "School" if school.find_file(self.population) else "synthetic"

    @property
    def update_noise_std(self) -> float | None:
        """None: the noise of a silo's steps mixes with its gradients."""
        return None

    def for_check(self) -> "MrMtlWorkload":
        """The same work without chance: no noise, and every step on all of a silo's examples."""
        return dataclasses.replace(self, noise_multiplier=0.0, full_batches=True)

    def silos(self) -> school.Silos:
        """All silos: every one takes part in every round."""
        return school.load_silos(self.population)

    def local_steps(self, num_examples: np.ndarray) -> np.ndarray:
        """Steps of each silo in one round, int32."""
        return np.maximum(1, num_examples // self.batch_size).astype(np.int32)

    def sampling_rates(self, num_examples: np.ndarray) -> np.ndarray:
        """The probability with which a step draws an example of each silo, float32; the expected batch is that x n."""
        rates = np.ones(len(num_examples)) if self.full_batches else np.minimum(1, self.batch_size / num_examples)
        return rates.astype(np.float32)


WORKLOADS: Mapping[str, Any] = {
    "W1": FedAvgWorkload("W1", "cnn"),
    "W1-dp": FedAvgWorkload("W1-dp", "cnn", clip_norm=0.1, noise_multiplier=1.0),
    "W2": FedAvgWorkload("W2", "mlp"),
    "W2-dp": FedAvgWorkload("W2-dp", "mlp", clip_norm=0.1, noise_multiplier=1.0),
    "W3": MrMtlWorkload("W3"),
}


def build_workload(name: str, clients_per_round: int | None = None, population: int | None = None) -> Any:
    """A workload of `WORKLOADS`, of its default size or another.

    Raises:
        ValueError: More clients a round than there are, or a part of the silos where all take part (W3).
    """
    workload = WORKLOADS[name]
    clients_per_round = clients_per_round or int(workload.clients_per_round)
    if isinstance(workload, MrMtlWorkload):
        population = population or clients_per_round
    population = population or max(clients_per_round, int(workload.population))
    if isinstance(workload, MrMtlWorkload) and clients_per_round != population:
        raise ValueError(f"{name}: all {population} silos take part in a round, not {clients_per_round}")
    if clients_per_round > population:
        raise ValueError(f"{name}: {clients_per_round} clients a round of a population of {population}")
    return dataclasses.replace(workload, clients_per_round=clients_per_round, population=population)
