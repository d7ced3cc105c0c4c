"""Audits what the server can read of silos' budgets: noise multiplier and epsilon from one upload, beside the truth."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
import numpy as np

from tff_pdp.audit.readings import Estimator, frame_of, noise_multiplier_of, read_noise, relative_error
from tff_pdp.audit.uploads import Upload, check_readable, first_uploads, quiet_coordinates, recording_method
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.model import model_seed
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.accounting.kept import side_by_side
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.words import plain
from tff_pdp.training.checkpoint import Checkpoint, load_latest
from tff_pdp.training.going_on import earlier_rounds
from tff_pdp.training.record.charges import Charges, read_charges
from tff_pdp.training.record.releases import CHECKPOINTS, check_files, check_record
from tff_pdp.training.run_folder import check_engine, other_settings
from tff_pdp.training.spending import arithmetic_here


class SiloReading(NamedTuple):
    """The budget of a silo, and what the server reads of it.

    Attributes:
      silo: the silo's id.
      epsilon_target: the silo's budget; infinite without protection.
      delta: delta of all epsilons, a public number.
      estimator: `quiet` or `median`, as in `read_noise`.
      num_values: number of coordinates that were read.
      noise_multiplier: the true z.
      noise_multiplier_read: z as read from the upload.
      noise_multiplier_error: relative error of `noise_multiplier_read`.
      epsilon: epsilon of the whole planned training with the true z.
      epsilon_read: epsilon of the same training with the z that was read.
      epsilon_error: relative error of `epsilon_read`.
    """

    silo: str
    epsilon_target: float
    delta: float
    estimator: Estimator
    num_values: int
    noise_multiplier: float
    noise_multiplier_read: float
    noise_multiplier_error: float
    epsilon: float
    epsilon_read: float
    epsilon_error: float


def audit_budgets(config: ExperimentConfig, name: str, frame: int = 2) -> dict[str, Any]:
    """Reads each silo's noise multiplier and epsilon from the silo's own upload in the first round of a run.

    The round is repeated with the run's own key: batches, noise and uploads are those of the run. Nothing new is
    released, and nothing is charged or written.

    Args:
      config: the experiment.
      name: name of a method that has been trained, or whose training was interrupted after the first round.
      frame: width, in pixels, of the outer frame of images that is zero in all examples; 0 for none.

    Returns:
      Plain data: the method, the number of planned rounds, the number of gradients in each silo's upload, `silos` with
      the fields of `SiloReading`, silos without an upload in the first round (`absent`), and the largest errors.

    Raises:
      ConfigError: there is no run, its first round cannot be repeated to the bit, silos have no budgets, or the
        method's uploads cannot be read.
      DataError: a file of the run is missing or damaged.
    """
    folder = config.algorithm_folder(name)
    saved, charges = _run_of(config, name, folder)
    method = build_method(config, name, earlier=earlier_rounds(config, name, folder))
    if not saved.was_made_with(method.config_hash):
        raise ConfigError(other_settings(config, name, folder, f"{saved.round_number} rounds"))
    check_plan(method.plan)
    check_readable(method)
    seed = model_seed(config)
    choices = dict(charges.choices)
    with experiment_engine(config, choices) as engine:
        check_engine(config, folder, engine.device)
        _check_repeatable(folder, charges, arithmetic_here(config, engine))
        recorder = recording_method(method, seed, config.privacy.selection_loss_bound)
        if config.training.engine == "inprocess":
            in_process: Any = engine
            in_process.compute_alike(recorder.process.next, method.process.next)
        uploads = first_uploads(method, recorder, saved.run_key, seed)
    readings = _readings(method, uploads, _quiet(method, frame))
    absent = [client_id for client_id in method.clients.client_ids if client_id not in uploads]
    return _content(method, uploads, readings, absent)


def audit_text(content: Mapping[str, Any]) -> str:
    """Returns the result of `audit_budgets` as a table for people."""
    heading = ("silo", "budget", "z", "z read", "error", "epsilon", "epsilon read", "error", "read from")
    rows: list[tuple[str, ...]] = [heading]
    for silo in content["silos"]:
        rows.append(
            (
                silo["silo"],
                _number(silo["epsilon_target"]),
                _number(silo["noise_multiplier"]),
                _number(silo["noise_multiplier_read"]),
                _percent(silo["noise_multiplier_error"]),
                _number(silo["epsilon"]),
                _number(silo["epsilon_read"]),
                _percent(silo["epsilon_error"]),
                f"{silo['num_values']} values, {silo['estimator']}",
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(heading))]
    last = len(heading) - 1
    lines = [
        "  ".join(
            cell.ljust(width) if place in (0, last) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    largest = content["largest_errors"]
    lines += [
        f"{content['title']}: budgets are inferable by whoever sees one upload of a silo (round 1, repeated with the "
        "run's key; nothing was released or charged)",
        "largest error of z: {}; of epsilon: {}".format(
            *(_percent(largest[key]).removeprefix("+") for key in ("noise_multiplier", "epsilon"))
        ),
    ]
    if content["absent"]:
        lines.append(f"no upload in round 1: {', '.join(content['absent'])}")
    return "\n".join(lines)


def _run_of(config: ExperimentConfig, name: str, folder: Path) -> tuple[Checkpoint, Charges]:
    """Returns a run's newest checkpoint and the record of its charges."""
    if name not in config.algorithms:
        raise ConfigError(f"--algorithm {name!r} is not in this experiment, which has: {', '.join(config.algorithms)}")
    if config.tuning.search_for(name):
        raise ConfigError(f"{name} has hyper-parameters in tuning.search: only a run of `tff-pdp train` can be audited")
    saved, charges = load_latest(folder / CHECKPOINTS), read_charges(folder)
    if saved is None or charges is None or not charges.through_round:
        raise ConfigError(f"{folder} holds no run with a first round to audit: run `tff-pdp train` first")
    check_record(folder, saved, charges)
    check_files(folder, saved)
    return saved, charges


def check_plan(plan: Any) -> None:
    """Checks that silos of a privacy plan have budgets that uploads may show.

    Raises:
      ConfigError: budgets are public, there are none, or no epsilon is known for the plan's batches.
    """
    if plan.samples_clients:
        raise ConfigError("privacy.kind user has one budget for all users, which is public: there is nothing to read")
    if not plan.budgets:
        raise ConfigError("privacy.kind none has no budgets: there is nothing to read")
    if plan.sampler != "poisson":
        raise ConfigError("privacy.sampler must be poisson for an audit: no epsilon is known for shuffled epochs")


def _check_repeatable(folder: Path, charges: Charges, arithmetic: Mapping[str, Any]) -> None:
    """Checks that repeating the first round gives the same bits as in the run.

    Raises:
      ConfigError: the round was run in an earlier attempt, or with another arithmetic.
    """
    attempt = charges.attempt
    if attempt.first_round != 1 or not attempt.arithmetic:
        raise ConfigError(
            f"{folder} goes on in attempt {attempt.number + 1}, from round {attempt.first_round}: the first round's "
            "noise belongs to an earlier attempt and is not drawn again. Audit a run that was not drawn anew"
        )
    stored = attempt.arithmetic[min(attempt.arithmetic)]
    if differing := sorted(name for name in {*stored, *arithmetic} if stored.get(name) != arithmetic.get(name)):
        raise ConfigError(
            f"{folder} ran its first round with another arithmetic (different here: {', '.join(differing)}): the same "
            "noise on differently rounded sums would be a new release. Audit on the machine, and with the versions, of "
            "the run"
        )


def _quiet(method: Method, frame: int) -> dict[str, np.ndarray]:
    """Returns the coordinates that get no signal if images have a frame of zeros; empty if there are none."""
    places = frame_of(tuple(method.model.input_shape), frame)
    # Scaled features are not zero any more.
    return {} if places is None or method.scalings else quiet_coordinates(method.model, places)


def _readings(method: Method, uploads: Mapping[str, Upload], quiet: Mapping[str, np.ndarray]) -> list[SiloReading]:
    plan: Any = method.plan
    found, calls = [], []
    for silo, upload in uploads.items():
        mechanism = plan.mechanisms[silo]
        reading = read_noise(upload.change, quiet)
        if math.isfinite(mechanism.clip_norm):
            read = noise_multiplier_of(reading.stddev, upload.gain, mechanism.clip_norm, mechanism.expected_batch_size)
        else:
            # Without a clip norm there is no sensitivity that noise could be compared with.
            read = 0.0
        found.append((silo, mechanism.noise_multiplier, read, reading))
        for multiplier in (mechanism.noise_multiplier, read):
            event = _training_event(plan, silo, multiplier)
            calls.append(functools.partial(_epsilon, event, plan.budgets[silo].delta, plan.adjacency))
    epsilons = side_by_side(calls)
    return [
        SiloReading(
            silo=silo,
            epsilon_target=plan.budgets[silo].epsilon,
            delta=plan.budgets[silo].delta,
            estimator=reading.estimator,
            num_values=reading.num_values,
            noise_multiplier=true,
            noise_multiplier_read=read,
            noise_multiplier_error=relative_error(read, true),
            epsilon=epsilon,
            epsilon_read=epsilon_read,
            epsilon_error=relative_error(epsilon_read, epsilon),
        )
        for (silo, true, read, reading), epsilon, epsilon_read in zip(found, epsilons[::2], epsilons[1::2], strict=True)
    ]


def _training_event(plan: Any, silo: str, noise_multiplier: float) -> dp_accounting.DpEvent:
    """Builds the event of a silo's whole planned training with another noise multiplier: public numbers alone."""
    mechanism = dataclasses.replace(plan.mechanisms[silo], noise_multiplier=noise_multiplier)
    other = dataclasses.replace(plan, mechanisms={**plan.mechanisms, silo: mechanism})
    events = [other.training_event(silo), *(event for event, _ in plan.fixed_events.get(silo, ()))]
    return dp_accounting.ComposedDpEvent([*events, *filter(None, [plan.drawn_noise.get(silo)])])


def _epsilon(event: dp_accounting.DpEvent, delta: float, adjacency: Any) -> float:
    return epsilon_bounds(event, delta, adjacency).best


def _content(
    method: Method, uploads: Mapping[str, Upload], readings: Sequence[SiloReading], absent: Sequence[str]
) -> dict[str, Any]:
    def largest(field: str) -> float:
        return max((abs(getattr(one, field)) for one in readings), default=math.nan)

    return json_safe(
        {
            "algorithm": method.algorithm.name,
            "title": method.algorithm.title,
            "rounds": method.plan.rounds,
            "gradients_in_upload": {silo: upload.num_gradients for silo, upload in uploads.items()},
            "budget_exposure": "inferable",
            "silos": [one._asdict() for one in readings],
            "absent": list(absent),
            "largest_errors": {
                "noise_multiplier": largest("noise_multiplier_error"),
                "epsilon": largest("epsilon_error"),
            },
        }
    )


def _number(value: Any) -> str:
    return plain(float(value)) if value is not None else plain(math.inf)


def _percent(value: Any) -> str:
    number = float(value)
    return f"{100 * number:+.1f} %" if math.isfinite(number) else plain(number)
