"""Runs tff_pdp itself: the computations that `compose` builds, on one of its engines."""

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.rounds import contender
from benchmarks.rounds.workloads import MrMtlWorkload
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.running import build_engine
from tff_pdp.experiment.examples import padded_sizes
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_linear_regression, build_mlp
from tff_pdp.privacy.accounting.accountants import Adjacency
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.privacy.plans.user import UserPlan
from tff_pdp.processes.aggregation import UserSum
from tff_pdp.processes.client_work import num_released
from tff_pdp.processes.compose import client_data_type, client_params_columns, client_params_type, compose

PACKAGES = ["tff_pdp", "tensorflow-federated", "tensorflow", "numpy"]


def build_on(engine: str, **options: Any) -> Callable[[Any], contender.Rounds]:
    """Builds the contender on an engine: `workload -> rounds`."""

    def build(workload: Any) -> contender.Rounds:
        kind = _MrMtl if isinstance(workload, MrMtlWorkload) else FedAvgRounds
        return kind(workload, build_engine(engine, **options))

    return build


class _Rounds:
    """Base of both workloads' rounds: an engine that stays installed, the server's state, and the run's key."""

    def __init__(self, workload: Any, engine: Any, algorithm: Any, model: Any, estimator: Any, plan: Any = None):
        self._workload, self.engine = workload, engine
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(engine.install())
        initial = workload.initial_weights() if hasattr(workload, "initial_weights") else model.init(0)
        self._names = list(initial)
        named = dict(zip(model.init(0), initial.values(), strict=True))
        model = dataclasses.replace(model, init=lambda seed: named)
        self.data_type = client_data_type(model)
        self._algorithm, self._estimator = algorithm, estimator
        self._params_type = client_params_type(algorithm, estimator)
        user_sum = None if plan is None else UserSum(plan.noise, plan.mechanism.sampling_rate)
        self.process = compose(algorithm, model, estimator=estimator, user_sum=user_sum)
        self.state = self.process.initialize()
        self._key = RunKey.from_test_seed(0)
        if plan is not None:
            self.state = plan.start(self.state, self._key.server_seeds())

    def _params(self, round_number: int, mechanism: Any, hparams: Any, size: int) -> ClientValues:
        seeds = self._key.client_seeds(round_number, [str(client) for client in range(size)])
        columns = client_params_columns(
            self._algorithm, self._estimator, mechanism=mechanism, hparams=hparams, seeds=seeds
        )
        return ClientValues.from_columns(self._params_type, columns)


class FedAvgRounds(_Rounds):
    """Rounds of FedAvg.

    Attributes:
      engine: the engine.
      process: the computations.
      state: the server's state.
      data_type: TFF type of a client's examples.
    """

    def __init__(self, workload: Any, engine: Any):
        """Builds the computations on an engine, which stays installed."""
        cnn = workload.model == "cnn"
        model = build_cnn((28, 28, 1), workload.num_classes) if cnn else build_mlp((784,), workload.num_classes, (200,))
        algorithm, estimator = ALGORITHMS.find("fed_avg")(), build_minibatch(model, workload.batch_size)
        plan = None if workload.clip_norm is None else _user_plan(workload, num_released(algorithm, model))
        super().__init__(workload, engine, algorithm, model, estimator, plan)
        self._number = 0

    def prepare(self, round_number: int) -> Any:
        """Loads the examples of a round's clients."""
        rows = []
        for client in self._workload.cohort(round_number):
            x, y = self._workload.client_data(client)
            rows.append(collections.OrderedDict(x=x, y=y.astype(np.int64), num_examples=np.int32(len(y))))
        stateless = [self.process.init_client(self.state)] * len(rows)
        return stateless, ClientValues.from_members(self.data_type, rows).stack()

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        """Runs a round; returns the new weights."""
        states, data = prepared
        size = len(states)
        self._number += 1
        hparams = {"learning_rate": self._workload.learning_rate, "local_steps": self._workload.local_steps}
        params = self._params(self._number, {}, hparams, size)
        self.state, _, _ = self.process.next(self.state, states, data, params)
        weights = self.state["algorithm"]["weights"].values()
        return {name: np.asarray(value) for name, value in zip(self._names, weights, strict=True)}


def _user_plan(workload: Any, size: int) -> UserPlan:
    """Returns a plan with the workload's noise, which is not calibrated to any budget."""
    return UserPlan(
        unit="user",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="a benchmark",
        budgets={},
        rounds=1,
        mechanism=UserMechanism(
            clip_norm=workload.clip_norm,
            noise_multiplier=workload.noise_multiplier,
            sampling_rate=1.0,
            expected_cohort=workload.clients_per_round,
        ),
        batch_size=workload.batch_size,
        num_users=workload.clients_per_round,
        is_constant=True,
        num_released=size,
        num_noised=size,
    )


class _MrMtl(_Rounds):
    def __init__(self, workload: Any, engine: Any):
        silos = workload.silos()
        model = build_linear_regression((silos.x.shape[-1],))
        super().__init__(workload, engine, ALGORITHMS.find("mr_mtl")(), model, build_dp_sgd(model))
        sizes = silos.num_examples
        rates = workload.sampling_rates(sizes)
        self._mechanism = {
            "clip_norm": workload.clip_norm,
            "noise_multiplier": workload.noise_multiplier,
            "sampling_rate": rates,
            "expected_batch_size": rates * sizes,
        }
        self._hparams = {
            "learning_rate": workload.learning_rate,
            "local_steps": workload.local_steps(sizes),
            "prox_weight": workload.prox_weight,
        }
        rows = [
            collections.OrderedDict(x=x[:padded], y=y[:padded], num_examples=np.int32(size))
            for x, y, size, padded in zip(silos.x, silos.y, sizes, padded_sizes(sizes, model), strict=True)
        ]
        self._data = ClientValues.from_members(self.data_type, rows).stack()
        self._states = [self.process.init_client(self.state)] * len(sizes)

    def prepare(self, round_number: int) -> Any:
        return round_number

    def run(self, prepared: Any) -> dict[str, np.ndarray]:
        params = self._params(prepared, self._mechanism, self._hparams, len(self._data))
        self.state, self._states, _ = self.process.next(self.state, self._states, self._data, params)
        if isinstance(self._states, ClientValues):
            weights = self._states.columns()["weights"]
        else:
            rows = [state["weights"] for state in self._states]
            weights = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return {"kernel": weights["dense_0/kernel"][:, :, 0], "bias": weights["dense_0/bias"][:, 0]}


_DEVICE = "gpu:0" if contender.needs_gpu() else "cpu"
FORMS: dict[str, Callable[[Any], contender.Rounds]] = {
    "native": build_on("native"),
    "loop": build_on("inprocess", device=_DEVICE, client_parallelism="loop"),
    "vectorized": build_on("inprocess", device=_DEVICE, client_parallelism="vectorized"),
}

if __name__ == "__main__":
    contender.main(FORMS[sys.argv[2]], PACKAGES)
