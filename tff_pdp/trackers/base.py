"""Defines a tracker, and the facts about a run and its rounds that a tracker is given.

A tracker is made by a function with keyword-only parameters, which are the settings of an entry of `training.trackers`.
An entry's `kind` names the function: a name from `tff_pdp.experiment.kinds.TRACKERS`, or `module:name`. An example of a
tracker of one's own, in a module `my_trackers`, is chosen by `{kind: "my_trackers:build_printer"}`:

    class Printer:
        def began(self, run): print(run.method, "of", run.title)
        def round_done(self, report): print(report.round_number, report.scalars())
        def ended(self, run): print("finished" if run.is_finished else "stopped")

    def build_printer():
        return Printer()
"""

import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tff_pdp.errors import ConfigError

# Begins the names of figures that are computed from clients' data without noise.
NONPRIVATE = "nonprivate"


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The facts about a run that are known before its rounds, and how far the run has come.

    Attributes:
      method: name of the method in the experiment.
      title: title of the experiment.
      folder: folder of the run.
      run_id: id of the run, which a resumed run keeps.
      rounds: planned number of rounds.
      settings: all settings of the experiment, as plain data.
      round_number: number of rounds that are done, the rounds since the last validation left out.
      is_finished: whether the last round is done; false at the beginning, and for a run that was stopped.
    """

    method: str
    title: str
    folder: Path
    run_id: str
    rounds: int
    settings: Mapping[str, Any]
    round_number: int = 0
    is_finished: bool = False

    def beside(self, name: str) -> Path:
        """Returns the folder for a tracker's files about this run, in the experiment's folder."""
        return self.folder.parent / name / self.folder.name


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """The figures of a round that `metrics.jsonl` has a row for.

    Attributes:
      round_number: number of the round, from 1.
      seconds: wall-clock seconds of the round, without the validation.
      epsilon_at_most: bound on the epsilon that the run has spent so far, the largest of all silos, or of all users;
        None if no epsilon is claimed. The bound follows from public settings.
      delta: the largest delta of a silo, or of all users; 0 without privacy.
      traffic: bytes that real clients would send and receive, by name.
      metric: name of the model's metric.
      higher_is_better: whether larger values of the metric are better.
      nonprivate: figures of clients' validation examples, computed without noise: `mean`, `loss`, `spread` (standard
        deviation over clients) and `worst` of the metric, and for silos `worst_client`, a name. None if
        `training.nonprivate_metrics` is false.
    """

    round_number: int
    seconds: float
    epsilon_at_most: float | None
    delta: float
    traffic: Mapping[str, int]
    metric: str
    higher_is_better: bool
    nonprivate: Mapping[str, Any] | None

    def scalars(self) -> dict[str, float]:
        """Returns all finite numbers by name; names of figures that are not private begin with `nonprivate/`.

        >>> report = RoundReport(5, 0.25, 1.5, 1e-5, {}, "accuracy", True, {"mean": 0.75, "worst_client": "north"})
        >>> report.scalars()
        {'epsilon_at_most': 1.5, 'nonprivate/seconds_per_round': 0.25, 'nonprivate/mean_accuracy': 0.75}
        """
        own = {} if self.epsilon_at_most is None else {"epsilon_at_most": self.epsilon_at_most}
        values: dict[str, Any] = {**own, **self.traffic}
        # The time of a round reveals how many clients took part.
        values[f"{NONPRIVATE}/seconds_per_round"] = self.seconds
        for name, value in (self.nonprivate or {}).items():
            shown = name if name == "loss" else f"{name}_{self.metric}"
            values[f"{NONPRIVATE}/{shown}"] = value
        return {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }


class Tracker(Protocol):
    """Receives the course of a training. An error that a method raises ends the tracker, but never the training."""

    def began(self, run: RunFacts) -> None:
        """Is called once before the first round of a command, for a new run and for a resumed run."""

    def round_done(self, report: RoundReport) -> None:
        """Is called after each round that is validated; a resumed run may repeat rounds."""

    def ended(self, run: RunFacts) -> None:
        """Is called once, after the last round or when the command is stopped."""


def require_package(kind: str, package: str, install: str) -> None:
    """Checks that the package of a tracker is installed.

    Args:
      kind: kind of the tracker, for the message.
      package: name of the package in imports.
      install: command that installs the package.

    Raises:
      ConfigError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"training.trackers: kind {kind} needs the package {package}, which is not installed: run `{install}`, or "
            "leave out the tracker"
        )
