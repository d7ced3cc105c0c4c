"""Trains an experiment at several values of its settings, on one client dataset, and states the cost of all runs.

Every point of a sweep is an experiment with a folder of its own, below `sweeps` in the experiment's folder. A link in
the point's folder leads to the one client dataset. Each run spends its own budget, and the results of all points are
looked at, so that the composed epsilon of the sweep is larger than the budget.
"""

import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tff_pdp.api.frames import ALGORITHM, history_frame, methods_frame
from tff_pdp.api.spending import composed_frame
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method, build_methods, keep_computations, open_clients
from tff_pdp.experiment.config import ExperimentConfig, with_values
from tff_pdp.reports.words import upper
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record.charges import run_id_of
from tff_pdp.training.train import train

# Folder, in the experiment's folder, of the points' folders.
SWEEPS = "sweeps"
# Sections and keys that all points share.
_SHARED = ("data", "output", "title", "export", "tuning", "privacy.registry")
# Test figures of a point, from the report.
_FIGURES = ("mean", "worst_decile", "shared_mean")
_LONGEST_NAME = 80


class Sweep(NamedTuple):
    """The results of a sweep.

    Attributes:
      points: one row for each point and method: the swept settings, `algorithm`, `validation` (the last mean of the
        validation metric over clients, by which to choose), the test figures `mean`, `worst_decile` and `shared_mean`
        if they were asked for, and `folder`.
      composed: the cost of all runs of the sweep together, by scope; see `tff_pdp.api.spending.composed_frame`.
      text: the composed cost in one line.
    """

    points: pd.DataFrame
    composed: pd.DataFrame
    text: str

    def _repr_html_(self) -> str:
        """Shows the points and the composed cost in a notebook."""
        return f"{self.points.to_html()}<p>{self.text}</p>"


class _Point(NamedTuple):
    """One point of a sweep.

    Attributes:
      values: values of the swept settings, by dotted key.
      config: the point's experiment.
    """

    values: Mapping[str, Any]
    config: ExperimentConfig

    @property
    def text(self) -> str:
        """The point's settings in one line."""
        return ", ".join(f"{name}={self.values[key]}" for key, name in short_names(self.values).items())


def run_sweep(
    config: ExperimentConfig,
    values: Mapping[str, Sequence[Any]],
    algorithms: Sequence[str] | None = None,
    *,
    test: bool = True,
    progress: bool = True,
) -> Sweep:
    """Trains every combination of some settings' values, and composes the cost of all runs.

    A point that has been trained already is not trained again, and costs nothing further. A point that was stopped goes
    on from its newest checkpoint.

    Guarantee: the epsilons of `Sweep.composed` bound the joint cost of all runs of the sweep (`epsilon`), and of all
      runs on record (`all_epsilon`), for each record of the scope.
    Assumes: as in `tff_pdp.training.record.all_runs.compose`.

    Args:
      config: the experiment; its client dataset must have been prepared.
      values: values to try, by dotted key of the setting.
      algorithms: names of the methods to train; by default, the methods whose settings are swept or, if the swept
        settings are not settings of a method, all methods.
      test: whether to test each point, and to write its report.
      progress: whether to show progress.

    Raises:
      ConfigError: a setting is unknown or cannot be swept, or a value is out of range; nothing was trained.
      BudgetError: a budget cannot be met, or a round would overspend.
      DataError: a file is damaged, or the client dataset has not been prepared.
    """
    combinations = _combinations(values)
    points = [_Point(chosen, _config_of(config, chosen, len(combinations))) for chosen in combinations]
    names = list(algorithms or _swept(config, values))
    num_clients = len(open_clients(config).client_ids)
    for point in points:
        # All points, before the first point spends its budget. A model may have its shapes from the client dataset.
        prepared = with_values(point.config, {"output": config.output}, "sweep")
        for algorithm, _ in build_methods(prepared, num_clients)[1].values():
            point.config.privacy.check(algorithm, point.config.training.weighting)
    rows = []
    with keep_computations({}):
        for number, point in enumerate(points, 1):
            if progress:
                print(f"[{number}/{len(points)}] {point.text}", file=sys.stderr, flush=True)
            _link_clients(config, point.config)
            rows += _run_point(point, names, test=test, progress=progress)
        first = points[0].config
        method = build_method(first, names[0])
    runs = {run_id_of(point.config.algorithm_folder(name)) for point in points for name in names}
    composed = composed_frame(first, method, {run for run in runs if run is not None})
    text = _text(composed)
    print(text, file=sys.stderr, flush=True)
    return Sweep(pd.DataFrame(rows), composed, text)


def short_names(keys: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """Returns a short name for each dotted key: its last part, or the whole key where the last part is not unique.

    >>> short_names(["algorithms.mr_mtl.prox_weight", "training.rounds"])
    {'algorithms.mr_mtl.prox_weight': 'prox_weight', 'training.rounds': 'rounds'}
    >>> list(short_names(["algorithms.mr_mtl.prox_weight", "algorithms.ditto.prox_weight"]).values())
    ['algorithms.mr_mtl.prox_weight', 'algorithms.ditto.prox_weight']
    """
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def _combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns every combination of the values, as a mapping from dotted key to value."""
    for key, choices in values.items():
        shared = next((one for one in _SHARED if f"{key}.".startswith(f"{one}.")), None)
        if shared is not None:
            raise ConfigError(f"sweep: {key} cannot be swept, because all points share {shared}")
        if isinstance(choices, str | Mapping) or not hasattr(choices, "__iter__"):
            raise ConfigError(f"sweep: {key} must be a list of the values to try, not {choices!r}")
    found = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    if not found or not values:
        raise ConfigError("sweep: there is no value to try; give a list of values by dotted key")
    return found


def _swept(config: ExperimentConfig, values: Mapping[str, Any]) -> list[str]:
    parts = [key.split(".") for key in values]
    if all(first == "algorithms" for first, *_ in parts):
        return list(dict.fromkeys(name for _, name, *_ in parts))
    return list(config.algorithms)


def _config_of(config: ExperimentConfig, chosen: Mapping[str, Any], num_points: int) -> ExperimentConfig:
    """Returns the experiment of a point; its folder is named after the settings, and its report names the sweep."""
    found = with_values(config, chosen, "sweep")
    content = found.to_dict()
    decisive = {key: content[key] for key in content if key not in ("title", "output", "export", "tuning")}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]
    named = ",".join(f"{name}={chosen[key]}" for key, name in short_names(chosen).items())
    readable = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", named)[:_LONGEST_NAME]
    own = {
        "output": str(Path(config.output) / SWEEPS / f"{readable}-{digest}"),
        "tuning.tuned": [*config.tuning.tuned, *short_names(chosen).values()],
        "tuning.configurations_tried": config.tuning.configurations_tried - 1 + num_points,
    }
    return with_values(found, own, "sweep")


def _link_clients(config: ExperimentConfig, point: ExperimentConfig) -> None:
    """Lets a point's folder lead to the experiment's client dataset."""
    link = point.clients_folder
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        # Relative, so that the experiment's folder can be moved as a whole.
        link.symlink_to(Path("..", "..", config.clients_folder.name), target_is_directory=True)


def _run_point(point: _Point, names: Sequence[str], *, test: bool, progress: bool) -> list[dict[str, Any]]:
    """Trains a point, and returns its rows of the table."""
    for name in names:
        train(point.config, name, resume=True, progress=progress)
    history = history_frame(point.config, names)
    tested = methods_frame(evaluate_experiment(point.config, names)) if test else None
    return [
        {
            **{short: point.values[key] for key, short in short_names(point.values).items()},
            ALGORITHM: name,
            "validation": history.loc[name]["mean"].iloc[-1],
            **({figure: tested.loc[name, figure] for figure in _FIGURES} if tested is not None else {}),
            "folder": str(point.config.algorithm_folder(name)),
        }
        for name in names
    ]


def _text(composed: pd.DataFrame) -> str:
    """Returns the composed cost of the scope that pays most, in one line."""
    columns = {str(name): composed[name].to_numpy() for name in composed.columns}
    runs, everything = int(columns["runs"].max()), int(columns["all_runs"].max())
    start = "the only run of this sweep" if runs == 1 else f"the {runs} runs of this sweep together"
    reasons = [reason for reason in columns["why_no_bound"] if reason]
    if reasons:
        return f"{start}: no epsilon holds ({reasons[0]})"
    worst = int(columns["epsilon"].argmax())
    epsilon, delta = float(columns["epsilon"][worst]), float(columns["delta"].max())
    cost = f"{composed.index[worst]} epsilon {upper(epsilon)} at delta {delta:g}"
    line = f"{start} {'costs' if runs == 1 else 'cost'} {cost}"
    if everything == runs:
        return line
    most = float(columns["all_epsilon"].max())
    total = f"epsilon {upper(most)}" if math.isfinite(most) else "no finite epsilon"
    return f"{line}; all {everything} releases on record on these records: {total}"
