"""Defines the work that contenders are timed on: sizes of models, hyperparameters, and data equal in every process.

This module uses NumPy only, because every contender's environment imports it. All arrays are float32 and labels int32;
the same arguments give the same arrays everywhere, which the check round verifies.

Silos are the School data (ILEA exam scores of 139 schools), or synthetic silos of the same shape.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

NUM_SILOS, NUM_FEATURES = 139, 28
_SCHOOL_SEED = 20230816
# Training examples of the real silos after the split: their quantiles at 0, 1/14, ... 1.
_SIZE_QUANTILES = (17, 28, 37, 48, 57, 65, 75, 82, 90, 103, 114, 125, 143, 160, 200)


class Silos(NamedTuple):
    """Training examples of all silos, padded with zeros to the largest silo.

    `x` is float32 `[silos, largest, features]`, standardised silo by silo; `y` is float32 `[silos, largest]`, scores
    mapped to [0, 1]; `num_examples` is int32 `[silos]`.
    """

    x: np.ndarray
    y: np.ndarray
    num_examples: np.ndarray


def find_file(num_silos: int = NUM_SILOS) -> Path | None:
    """Returns the real file in the folder that TFF_PDP_DATA names, if it exists and has this number of silos."""
    folder = os.environ.get("TFF_PDP_DATA")
    if not folder or num_silos != NUM_SILOS:
        return None
    file = Path(folder) / "school" / "school.mat"
    return file if file.is_file() else None


def load_silos(num_silos: int = NUM_SILOS) -> Silos:
    """Returns the real silos if `find_file` finds them, otherwise synthetic silos."""
    file = find_file(num_silos)
    silos = _read_training_parts(file) if file else _draw_silos(num_silos)
    num_examples = np.array([len(y) for _, y in silos], np.int32)
    x = np.zeros([len(silos), num_examples.max(), NUM_FEATURES], np.float32)
    y = np.zeros(x.shape[:2], np.float32)
    for index, (silo_x, silo_y) in enumerate(silos):
        x[index, : len(silo_y)] = silo_x
        y[index, : len(silo_y)] = silo_y
    return Silos(x, y, num_examples)


def _read_training_parts(file: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    import scipy.io  # Only the environments that run this workload have it.

    cells = scipy.io.loadmat(str(file))
    rng = np.random.default_rng(_SCHOOL_SEED)
    silos = []
    for x, y in zip(cells["X"][0], cells["Y"][0], strict=True):
        # 80/20, the test part rounded up.
        kept = rng.permutation(len(x))[: len(x) - -(-len(x) // 5)]
        silos.append((_standardise(x[kept].astype(np.float64)), (y[kept, 0].astype(np.float64) - 1) / 69))
    return silos


def _draw_silos(num_silos: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(_SCHOOL_SEED)
    quantiles = np.linspace(0, 1, len(_SIZE_QUANTILES))
    sizes = np.interp(np.linspace(0, 1, num_silos), quantiles, _SIZE_QUANTILES).round().astype(int)
    common = rng.normal(0, 0.03, NUM_FEATURES)
    silos = []
    for size in rng.permutation(sizes):
        x = _standardise(rng.normal(size=[size, NUM_FEATURES]))
        y = 0.5 + x @ (common + rng.normal(0, 0.01, NUM_FEATURES)) + rng.normal(0, 0.1, size)
        silos.append((x, y.clip(0, 1)))
    return silos


def _standardise(x: np.ndarray) -> np.ndarray:
    deviation = x.std(axis=0)
    return (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1)


Weights = dict[str, np.ndarray]
_SEED = 20230815


class Workload(Protocol):
    """Properties of a workload that the orchestrator needs."""

    name: str
    clients_per_round: int
    population: int

    @property
    def repetitions(self) -> int:
        """Returns the default number of recorded rounds."""
        ...

    @property
    def data_source(self) -> str:
        """Returns the name of the data that the workload uses on this machine."""
        ...

    @property
    def update_noise_std(self) -> float | None:
        """Returns the standard deviation of the noise in each weight of a round's update; None if it is not checked."""
        ...


@dataclasses.dataclass(frozen=True)
class FedAvgWorkload:
    """Federated averaging of an image classifier; with a clip norm, with user-level central DP.

    In a round, each client of the cohort runs one epoch of SGD over its examples from the server's weights, and the
    update is clipped to `clip_norm` (L2, over all weights jointly). Noise of standard deviation `noise_multiplier *
    clip_norm` is added to the sum of the updates. The sum divided by `clients_per_round` is added to the server's
    weights.
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
        """Returns the default number of recorded rounds."""
        return {"cnn": 5, "mlp": 9}[self.model]

    @property
    def data_source(self) -> str:
        """Returns `synthetic`."""
        return "synthetic"

    @property
    def local_steps(self) -> int:
        """Returns the number of SGD steps of one client in one round."""
        return self.examples_per_client // self.batch_size

    @property
    def update_noise_std(self) -> float | None:
        """Returns the standard deviation of DP's noise in each weight of a round's update; None without DP."""
        return None if self.clip_norm is None else self.clip_norm * self.noise_multiplier / self.clients_per_round

    def for_check(self) -> "FedAvgWorkload":
        """Returns the same work without randomness: no noise, and equal examples, whose order does not matter.

        The clip stays, because the check covers it.
        """
        return dataclasses.replace(self, noise_multiplier=0.0, identical_examples=True)

    def initial_weights(self) -> Weights:
        """Returns Glorot-uniform kernels and zero biases, in the order of the layers.

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
        """Returns the clients of a round, drawn uniformly without replacement; the same for every contender."""
        rng = np.random.default_rng([_SEED, round_number])
        return rng.choice(self.population, self.clients_per_round, replace=False).tolist()

    def client_data(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a client's images in [0, 1], float32 `[examples, 784]` or `[examples, 28, 28, 1]`, and int32 labels.

        An image mixes its class's prototype and noise in equal parts, so that training has a task and weights stay
        finite.
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

    In a round, every silo runs `n // batch_size` steps (at least one) from its own weights. A step draws each of the
    silo's n examples with probability `batch_size / n`, clips each gradient of half the squared error to `clip_norm`
    (L2, kernel and bias jointly), adds noise of standard deviation `noise_multiplier * clip_norm` to the sum, divides
    by the expected batch size, adds `prox_weight * (weights - mean)`, and adds `-learning_rate` times the result to the
    weights. The mean then moves by the unweighted average of the silos' movements.
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
        """Returns the default number of recorded rounds."""
        return 25

    @property
    def data_source(self) -> str:
        """Returns `School` if the real file exists and fits, otherwise `synthetic`."""
        return "School" if find_file(self.population) else "synthetic"

    @property
    def update_noise_std(self) -> float | None:
        """Returns None, because the noise of a silo's steps mixes with the gradients."""
        return None

    def for_check(self) -> "MrMtlWorkload":
        """Returns the same work without randomness: no noise, and every step on all of a silo's examples."""
        return dataclasses.replace(self, noise_multiplier=0.0, full_batches=True)

    def silos(self) -> Silos:
        """Returns all silos, which take part in every round."""
        return load_silos(self.population)

    def local_steps(self, num_examples: np.ndarray) -> np.ndarray:
        """Returns the number of steps of each silo in one round, int32."""
        return np.maximum(1, num_examples // self.batch_size).astype(np.int32)

    def sampling_rates(self, num_examples: np.ndarray) -> np.ndarray:
        """Returns, for each silo, the probability with which a step draws an example, float32."""
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
    """Returns a workload of `WORKLOADS`, in its default size or another size.

    Raises:
        ValueError: There are more clients per round than the population has, or W3 has fewer silos per round than that.
    """
    workload = WORKLOADS[name]
    clients_per_round = clients_per_round or int(workload.clients_per_round)
    if isinstance(workload, MrMtlWorkload):
        population = population or clients_per_round
    population = population or max(clients_per_round, int(workload.population))
    if isinstance(workload, MrMtlWorkload) and clients_per_round != population:
        raise ValueError(f"{name}: all {population} silos take part in a round, not {clients_per_round}")
    if clients_per_round > population:
        raise ValueError(f"{name}: {clients_per_round} clients per round, but a population of only {population}")
    return dataclasses.replace(workload, clients_per_round=clients_per_round, population=population)
