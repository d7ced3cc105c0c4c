"""Runs one job of a reproduction in a worker process: trains a method in memory, tests it, and returns its row."""

import contextlib
import dataclasses
import json
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.data.manifest import SUCCESS_FILE
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.running import Engine
from tff_pdp.errors import BudgetError
from tff_pdp.experiment.before_training import plan_releases, release_before_training
from tff_pdp.experiment.build import Computations, build_method, experiment_engine, keep_computations, open_clients
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.examples import Examples
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.experiment.synthetic_data import synthetic_images
from tff_pdp.lock import only_writer
from tff_pdp.privacy.plans.plan import PrivacyPlan
from tff_pdp.reports.summary import mean_over_examples, mean_over_silos, worst_decile
from tff_pdp.reproduce.jobs import Job, Reproduction
from tff_pdp.reproduce.sweep import Outcome, keep_images, result_row
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.evaluate import pooled_figures
from tff_pdp.training.rounds import evaluate_clients, first_state, run_round
from tff_pdp.training.traffic import TrafficCount

# Settings of methods that rows repeat.
_ROW_SETTINGS = ("learning_rate", "prox_weight", "adaptation_learning_rate")
# Data sets in memory: a seed may have one of its own.
_KEPT_DATA = 8

# All clients' examples stacked, where all take part in every round; otherwise a round's cohort is taken from them.
Split = ClientValues | Examples


@dataclasses.dataclass(frozen=True)
class Tested:
    """The test results of one job.

    Attributes:
      personal: test metric of each client's personal model; NaN where a client has no test examples, or none for which
        the metric is defined.
      shared: test metric of the shared model on each client; NaN also for a method without a shared model.
      num_examples: number of each client's test examples.
      pooled: metrics of all clients' test examples together, by name.
      traffic: bytes that all clients would send and receive, if they are counted.
    """

    personal: list[float]
    shared: list[float]
    num_examples: list[int]
    pooled: dict[str, float]
    traffic: dict[str, int]


class JobRunner:
    """Runs jobs one after the other, and keeps engine, compiled computations and data, which jobs share.

    Attributes:
      computations: computations compiled so far, by `computations_key`.
    """

    def __init__(self, reproduction: Reproduction):
        """Prepares to run the jobs of one reproduction, all on one engine."""
        self._reproduction = reproduction
        self._open = contextlib.ExitStack()
        self._engine: Engine | None = None
        self.computations: Computations = {}
        self._open.enter_context(keep_computations(self.computations))
        self._data: OrderedDict[Hashable, tuple[Split, Split]] = OrderedDict()

    def __call__(self, job: Job) -> Outcome:
        """Trains and tests one job.

        Raises:
          ConfigError, DataError, EngineError: preparation, building or training failed. A budget that allows no run
            raises no error: the outcome then has the reason.
          FloatingPointError: the test metric is not finite.
        """
        config = self._reproduction.config(job)
        _prepare_once(config)
        self._engine = self._engine or self._open.enter_context(experiment_engine(config))
        try:
            _release_once(config)
            (name,) = config.algorithms
            method = build_method(config, name)
            self._keep_images(job, config, method)
            tested = self._test(config, method)
        except BudgetError as error:
            return Outcome(job, row=None, infeasible=" ".join(str(error).split()))
        value = self._mean(tested.personal, tested.num_examples)
        shared = self._mean(tested.shared, tested.num_examples)
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the test metric is {value}: training diverged, or no client has test examples for this metric"
            )
        metric, (settings,) = self._reproduction.setting.metric, config.algorithms.values()
        shown: dict[str, Any] = {name: settings[name] for name in _ROW_SETTINGS if name in settings}
        return Outcome(
            job,
            result_row(
                job,
                "mse" if metric == "mean_squared_error" else metric,
                value,
                with_secret_key=with_secret_key(method.plan),
                mean_over_clients=mean_over_silos(tested.personal),
                worst_decile=worst_decile(tested.personal, method.model.metric),
                shared=shared if self._reproduction.setting.shows_shared_model and math.isfinite(shared) else None,
                pooled=tested.pooled,
                traffic=tested.traffic,
                settings={**shown, **method.plan.noise_facts},
            ),
        )

    def close(self) -> None:
        """Closes the engine, if one was started, and ends the sharing of compiled computations."""
        self._open.close()

    def _mean(self, values: Sequence[float], num_examples: Sequence[int]) -> float:
        """Returns the mean over clients with the setting's weights; NaN without any value."""
        is_weighted = self._reproduction.setting.averages == "examples"
        return mean_over_examples(values, num_examples) if is_weighted else mean_over_silos(values)

    def _test(self, config: ExperimentConfig, method: Method) -> Tested:
        """Trains and tests a method."""
        train, test = self._splits(config, method)
        synthetic = method.first_phase.round_data("train") if method.first_phase else train
        # The plan has been checked as a whole, so that rounds need not be charged one by one to a ledger nobody reads.
        state = dataclasses.replace(first_state(method, config.training.test_only_seed), ledger=None)
        for round_number in range(1, config.training.rounds + 1):
            state = run_round(method, state, round_number, synthetic if round_number <= method.first_rounds else train)
        # Users may adapt their model to their own examples before the model is used.
        to_adapt = train if isinstance(train, Examples) else None
        metrics = evaluate_clients(method, state, test, to_adapt)
        measured = method.model.metric.example_name
        return Tested(
            personal=[float(metrics[client_id]["personal"][measured]) for client_id in state.client_ids],
            shared=[
                float(metrics[client_id].get("global", {}).get(measured, math.nan)) for client_id in state.client_ids
            ],
            num_examples=[method.clients.num_examples(client_id, "test") for client_id in state.client_ids],
            pooled={**pooled_figures(method, state, test, to_adapt), **_prevalence(method)},
            traffic=_traffic(method, state) if self._reproduction.setting.traffic_baseline else {},
        )

    def _keep_images(self, job: Job, config: ExperimentConfig, method: Method) -> None:
        section, phase = config.privacy.synthetic, method.first_phase
        if section is None or phase is None:
            return
        if silos := synthetic_images(phase.source):
            pairs = {client_id: (images.x, images.y) for client_id, images in silos.items()}
            keep_images(self._reproduction.output, job, pairs, (section.generator.low, section.generator.high))

    def _splits(self, config: ExperimentConfig, method: Method) -> tuple[Split, Split]:
        content = config.to_dict()
        decisive = [content["model"], content["privacy"]["feature_scaling"], method.plan.samples_clients]
        key = (config.output, json.dumps(decisive, sort_keys=True))
        if key not in self._data:
            read = method.examples if method.plan.samples_clients else method.client_data
            self._data[key] = read("train"), read("test")
            if len(self._data) > _KEPT_DATA:
                self._data.popitem(last=False)
        self._data.move_to_end(key)
        return self._data[key]


def with_secret_key(plan: PrivacyPlan) -> dict[str, Any]:
    """Returns the claim that a planned training would have with a secret key instead of a test-only seed."""
    epsilon = None if plan.claim == "none" else plan.planned_epsilon()
    return {"claim": plan.claim, "claim_reason": plan.claim_reason, "epsilon": epsilon}


def _traffic(method: Method, state: Checkpoint) -> dict[str, int]:
    """Counts the bytes that all silos would send and receive in a training that has ended."""
    counted = TrafficCount(method).through(state.server_state["algorithm"], state.round_number)
    return {name: counted[f"total_{name}"] for name in ("uplink_bytes", "downlink_bytes")}


def _prevalence(method: Method) -> dict[str, float]:
    """Computes the share of positive test examples, for a model that ranks.

    With many examples, the share is the average precision of a random ranking.
    """
    if method.model.ranking is None:
        return {}
    labels = [method.clients.load(client_id, "test").y for client_id in method.clients.client_ids]
    return {"prevalence": float(np.mean(np.concatenate(labels)))}


def _prepare_once(config: ExperimentConfig) -> None:
    """Prepares the client dataset, unless it is there; other workers that need the dataset wait."""
    with only_writer(Path(config.output), waits=True):
        if not (config.clients_folder / SUCCESS_FILE).exists():
            prepare_clients(config)


def _release_once(config: ExperimentConfig) -> None:
    """Makes silos' synthetic data, unless they are there; other workers that need these data wait."""
    if config.privacy.synthetic is not None:
        with only_writer(Path(config.output), waits=True):
            clients = open_clients(config)
            release_before_training(config, clients, plan_releases(config, clients))
