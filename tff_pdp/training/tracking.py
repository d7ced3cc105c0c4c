"""Reports each validated round of a training: to `metrics.jsonl`, and to the trackers of `training.trackers`."""

import copy
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig, Values
from tff_pdp.experiment.kinds import TRACKERS
from tff_pdp.experiment.method import Method
from tff_pdp.kinds import settings_of
from tff_pdp.models.metrics import Metric
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.summary import mean_over_silos, spread, worst_first
from tff_pdp.settings import read_settings
from tff_pdp.trackers.base import NONPRIVATE, RoundReport, RunFacts, Tracker
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.run_folder import append_metrics

# Parts of a training for whose ends the bound on epsilon is computed.
_STAGES = 50


def build_trackers(config: ExperimentConfig) -> list[Tracker]:
    """Builds the trackers of an experiment, before anything is spent.

    Raises:
      ConfigError: a kind is unknown, a setting is unknown or out of range, or a tracker's package is not installed.
    """
    return [_tracker(section, place) for place, section in enumerate(config.training.trackers)]


def _tracker(section: Values, place: int) -> Tracker:
    key, given = f"training.trackers[{place}]", dict(section)
    kind = given.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"missing key {key}.kind: one of {', '.join(TRACKERS.own)}, or module:name")
    builder = TRACKERS.find(kind)
    return builder(**asdict(read_settings(settings_of(builder), given, "the experiment", key)))


class Tracking:
    """Reports one run; a context manager around the run's rounds.

    A tracker that raises an error is left out from then on, with one warning: no tracker stops a training that has
    been paid for.
    """

    def __init__(
        self, config: ExperimentConfig, name: str, state: Checkpoint, run_id: str, trackers: Sequence[Tracker]
    ):
        """Collects the facts of a run that continues from `state`."""
        self._trackers = list(trackers)
        self._facts = RunFacts(
            method=name,
            title=config.title,
            folder=config.algorithm_folder(name),
            run_id=run_id,
            rounds=config.training.rounds,
            settings=config.to_dict(),
            round_number=state.round_number,
        )

    def __enter__(self) -> "Tracking":
        self._tell("began", self._facts)
        return self

    def __exit__(self, *_: object) -> None:
        self._tell("ended", self._facts)

    def round_done(self, report: RoundReport) -> None:
        """Reports a round that was validated.

        Raises:
          OSError: `metrics.jsonl` cannot be written.
        """
        number = report.round_number
        append_metrics(self._facts.folder, number, _row(report))
        self._facts = dataclasses.replace(self._facts, round_number=number, is_finished=number == self._facts.rounds)
        self._tell("round_done", report)

    def _tell(self, call: str, fact: RunFacts | RoundReport) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, call)(fact)
            # Whatever a tracker does wrong, for instance on a full disk or without a network.
            except Exception as error:
                self._trackers.remove(tracker)
                print(
                    f"{self._facts.method}: warning: the tracker {type(tracker).__name__} failed and is left out from "
                    f"now on ({type(error).__name__}: {error}); training goes on",
                    file=sys.stderr,
                )


class RoundReports:
    """Makes the reports of a method's rounds.

    The bound on epsilon takes about a millisecond for each silo. In a long training, the bound is therefore computed
    for the end of each fiftieth of the planned rounds, and holds for all rounds until then.
    """

    def __init__(self, method: Method):
        """Stores the method."""
        self._method = method
        self._through, self._spent = 0, (None, 0.0)

    def report(
        self, state: Checkpoint, seconds: float, traffic: Mapping[str, int], personal: Mapping[str, np.ndarray] | None
    ) -> RoundReport:
        """Makes the report of the last round of `state`.

        Args:
          state: state after the round.
          seconds: wall-clock seconds of the round.
          traffic: bytes that real clients would send and receive, by name.
          personal: exact metrics of clients' personal models on validation examples, `[clients]` each, by name; None if
            figures that are not private are switched off.
        """
        metric = self._method.model.metric
        if state.round_number > self._through:
            self._through, self._spent = self._spent_at_most(state)
        epsilon, delta = self._spent
        return RoundReport(
            round_number=state.round_number,
            seconds=seconds,
            epsilon_at_most=epsilon,
            delta=delta,
            traffic=traffic,
            metric=metric.name,
            higher_is_better=metric.higher_is_better,
            nonprivate=None if personal is None else _figures(personal, metric, self._silos()),
        )

    def _spent_at_most(self, state: Checkpoint) -> tuple[int, tuple[float | None, float]]:
        """Returns a round, the largest bound on epsilon of a scope through that round, and the largest delta.

        The bound is None if nothing is claimed.
        """
        plan, ledger = self._method.plan, state.ledger
        if ledger is None or plan.claim == "none" or state.run_key.is_test_only:
            return plan.rounds, (None, 0.0)
        stage = max(1, plan.rounds // _STAGES)
        through = min(plan.rounds, math.ceil(state.round_number / stage) * stage)
        ledger = copy.deepcopy(ledger)
        for number in range(state.round_number + 1, through + 1):
            plan.charge_round(ledger, number)
        epsilon = max(map(ledger.epsilon_at_most, ledger.budgets))
        delta = max(budget.delta for budget in ledger.budgets.values())
        return through, (epsilon if math.isfinite(epsilon) else None, delta)

    def _silos(self) -> Sequence[str]:
        """Returns the names of silos; empty for users, whose participation is not to be told."""
        return () if self._method.plan.samples_clients else self._method.clients.client_ids


def _row(report: RoundReport) -> dict[str, Any]:
    """Returns the row of a report in `metrics.jsonl`; `epsilon_at_most` is null if no epsilon is claimed."""
    own = dataclasses.asdict(report)
    del own["round_number"]
    nonprivate = own.pop(NONPRIVATE)
    return json_safe({**own.pop("traffic"), **own, **({} if nonprivate is None else {NONPRIVATE: nonprivate})})


def _figures(personal: Mapping[str, np.ndarray], metric: Metric, names: Sequence[str]) -> dict[str, Any]:
    values = personal[metric.example_name].tolist()
    worst = next(iter(worst_first(values, metric)), math.nan)
    named = {"worst_client": names[values.index(worst)]} if names and not math.isnan(worst) else {}
    return {
        "mean": mean_over_silos(values),
        "loss": mean_over_silos(personal["loss"].tolist()),
        "spread": spread(values),
        "worst": worst,
        **named,
    }
