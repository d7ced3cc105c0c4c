"""Runs pfl: its federated averaging, simulated backend and central Gaussian mechanism, on PyTorch.

PyTorch starts a thread for each core by default. The threads wait for each other by spinning: if other processes use
the cores, rounds take 10 to 100 times longer. So there is a second contender with one thread; only the CNN is slower
with one.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

from benchmarks.rounds import contender
from benchmarks.rounds.workloads import FedAvgWorkload

_NEVER = 10**9
# PyTorch raises an error where there is no GPU. pfl itself puts models on the GPU that PyTorch sees.
_DEVICE = torch.device("cuda:0" if contender.needs_gpu() else "cpu")


def build(workload: FedAvgWorkload) -> contender.Rounds:
    """Builds pfl's federated averaging; with a clip norm, pfl's Gaussian mechanism noises the sum centrally."""
    return _Rounds(workload)


class _Rounds:
    def __init__(self, workload: FedAvgWorkload):
        self._workload = workload
        self._classifier = _Classifier(workload.model, workload.initial_weights())
        self._model = PyTorchModel(
            self._classifier, torch.optim.SGD, torch.optim.SGD(self._classifier.parameters(), lr=1.0)
        )
        self._algorithm = FederatedAveraging()
        self._training = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=workload.learning_rate, local_batch_size=workload.batch_size
        )
        self._postprocessors = []
        if workload.clip_norm is not None:
            mechanism = GaussianMechanism(workload.clip_norm, workload.noise_multiplier)
            self._postprocessors = [CentrallyAppliedPrivacyMechanism(mechanism)]
        self._rounds_done = 0

    def prepare(self, round_number: int) -> Any:
        cohort = self._workload.cohort(round_number)
        arrays = {client: self._workload.client_data(client) for client in cohort}
        datasets = {
            client: Dataset(
                (torch.from_numpy(_channels_first(x)).to(_DEVICE), torch.from_numpy(y.astype(np.int64)).to(_DEVICE))
            )
            for client, (x, y) in arrays.items()
        }
        federated = FederatedDataset(datasets.__getitem__, iter(cohort).__next__)
        return SimulatedBackend(federated, federated, self._postprocessors)

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        # The algorithm counts its iterations: when asked for one more than it has done, it does one.
        self._rounds_done += 1
        self._algorithm.run(
            NNAlgorithmParams(
                central_num_iterations=self._rounds_done,
                evaluation_frequency=_NEVER,
                train_cohort_size=self._workload.clients_per_round,
                val_cohort_size=0,
            ),
            prepared,
            self._model,
            self._training,
            send_metrics_to_platform=False,
        )
        return self._classifier.as_numpy()


class _Classifier(torch.nn.Module):
    """Model of the workload in PyTorch's layout: channels first, kernels transposed."""

    def __init__(self, model: str, weights: Mapping[str, np.ndarray]):
        super().__init__()
        self._is_cnn = model == "cnn"
        self._kinds = {name.replace("/", "_"): name for name in weights}
        for attribute, name in self._kinds.items():
            value = torch.from_numpy(np.ascontiguousarray(_to_torch(name, weights[name], self._is_cnn)))
            self.register_parameter(attribute, torch.nn.Parameter(value))

    def forward(self, x: Any) -> Any:
        """Returns the logits `[batch, classes]`."""
        functional = torch.nn.functional
        if self._is_cnn:
            x = functional.relu(functional.conv2d(x, self.conv_0_kernel, self.conv_0_bias))
            x = functional.relu(functional.conv2d(x, self.conv_1_kernel, self.conv_1_bias))
            x = functional.max_pool2d(x, 2).flatten(1)
        x = functional.relu(functional.linear(x, self.dense_0_kernel, self.dense_0_bias))
        return functional.linear(x, self.dense_1_kernel, self.dense_1_bias)

    def loss(self, x: Any, y: Any) -> Any:
        """Returns the loss that pfl minimises: mean softmax cross-entropy."""
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Any, y: Any) -> dict[str, Any]:
        """Returns metrics; pfl asks only in its first iteration, which is not a recorded round."""
        with torch.no_grad():
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}

    def as_numpy(self) -> dict[str, np.ndarray]:
        """Returns a copy of the weights in the workload's layout."""
        with torch.no_grad():
            values = {name: getattr(self, attribute).cpu().numpy() for attribute, name in self._kinds.items()}
            return {name: _from_torch(name, value, self._is_cnn).copy() for name, value in values.items()}


def _channels_first(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if x.ndim == 4 else x


def _to_torch(name: str, value: np.ndarray, is_cnn: bool) -> np.ndarray:
    if name == "dense_0/kernel" and is_cnn:
        # An image flattened with channels first has its pixels in another order.
        return value.reshape(12, 12, 64, -1).transpose(3, 2, 0, 1).reshape(-1, 12 * 12 * 64)
    return value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T


def _from_torch(name: str, value: np.ndarray, is_cnn: bool) -> np.ndarray:
    if name == "dense_0/kernel" and is_cnn:
        return value.reshape(-1, 64, 12, 12).transpose(2, 3, 1, 0).reshape(12 * 12 * 64, -1)
    return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]) if len(sys.argv) > 2 else len(os.sched_getaffinity(0)))
    contender.main(build, ["pfl", "torch", "numpy"])
