"""Measures one workload with several contenders, which take turns round by round; leaves out contenders that fail."""

import contextlib
import datetime
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine, gpu_names
from benchmarks.rounds.contender_process import ContenderError, ContenderProcess, contender_environment
from benchmarks.rounds.workloads import Workload

WARM_UP_ROUNDS = 2
# After the check round, weights are a few hundredths; rounding makes them differ by 1e-8 and less.
CHECK_TOLERANCE = 1e-6
_NOISE_TOLERANCE = 0.05
_REFERENCE = "floor-tf"

Row = dict[str, Any]


def measure(
    workload: Workload,
    commands: Mapping[str, Sequence[str]],
    repetitions: int,
    timeout_seconds: float,
    on_step: Callable[[str], None] = lambda contender: None,
    device: str = "cpu",
) -> tuple[list[Row], dict[str, str]]:
    """Runs the contenders alternately and checks that they did the same work.

    All processes run throughout. In each pass every contender runs one round; the order is reversed after every pass.

    Args:
        workload: Workload that the contenders run; the commands name it too.
        commands: Command of each contender, by name.
        repetitions: Number of recorded rounds, after two that are not recorded.
        timeout_seconds: Largest number of seconds for each answer of a contender.
        on_step: Function called after every round and every check, with the contender's name.
        device: `cpu`, or `gpu`: where all contenders compute.

    Returns:
        One row for each contender that ran to the end, and the errors of the others, by name.
    """
    recordings = {name: _Recording(command, timeout_seconds, device) for name, command in commands.items()}
    errors: dict[str, str] = {}
    load_before = os.getloadavg()[0]

    def attempt(name: str, action: Callable[..., None], *arguments: Any) -> None:
        if name in errors:
            return
        try:
            action(recordings[name], *arguments)
        except ContenderError as error:
            errors[name] = str(error)
            recordings[name].stop()

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rounds-")))
        for name, recording in recordings.items():
            stack.callback(recording.stop)
            attempt(name, _Recording.start)
        for round_number in range(WARM_UP_ROUNDS + repetitions):
            for name in list(commands)[:: 1 if round_number % 2 == 0 else -1]:
                attempt(name, _Recording.record, round_number)
                on_step(name)
        for name in commands:
            attempt(name, _Recording.finish, workload, folder / f"{name}.npz")
            on_step(name)

    checks = {name: recording.check_weights for name, recording in recordings.items() if name not in errors}
    rows = []
    for name, difference in _compare_checks(checks).items():
        if difference > CHECK_TOLERANCE:
            errors[name] = f"not the same work: after the check round its weights differ by {difference:.2g}"
        else:
            rows.append(_build_row(workload, name, recordings[name], difference, load_before, device))
    return rows, errors


class _Recording:
    """Process of a contender, once started, and its measurements."""

    def __init__(self, command: Sequence[str], timeout_seconds: float, device: str):
        self._command, self._timeout_seconds, self._device = command, timeout_seconds, device
        self._process: Any = None
        self.versions: dict[str, str] = {}
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.first_round_seconds = 0.0
        self.peak_rss_mb = 0.0
        self.check_weights: Mapping[str, np.ndarray] = {}

    def start(self) -> None:
        self._process = ContenderProcess(self._command, contender_environment(self._device), self._timeout_seconds)
        self.versions = self._process.versions

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def record(self, round_number: int) -> None:
        if round_number == 0:
            self.first_round_seconds += self._process.ask("build")["seconds"]
        self._process.ask("prepare", round_number)
        cpu_before = self._process.cpu_seconds()
        seconds = self._process.ask("go", round_number)["seconds"]
        cpu_seconds = self._process.cpu_seconds() - cpu_before
        if round_number == 0:
            self.first_round_seconds += seconds
        if round_number >= WARM_UP_ROUNDS:
            self.seconds.append(seconds)
            self.cpu_seconds.append(cpu_seconds)

    def finish(self, workload: Workload, check_file: Path) -> None:
        # Read before the check, which builds a second instance.
        self.peak_rss_mb = self._process.peak_rss_mb()
        _check_statistics(self._process.ask("inspect"), workload.update_noise_std)
        self._process.ask("check", str(check_file))
        with np.load(check_file) as weights:
            self.check_weights = dict(weights)


def _check_statistics(weights: Mapping[str, Any], expected_std: float | None) -> None:
    if not weights["finite"]:
        raise ContenderError("its weights are not finite")
    # A clipped update is negligible beside noise of this size: the update's deviation is the noise's deviation.
    if expected_std is not None and abs(weights["update_std"] / expected_std - 1) > _NOISE_TOLERANCE:
        raise ContenderError(f"the noise of a weight has deviation {weights['update_std']:.3g}, not {expected_std:.3g}")


def _compare_checks(checks: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns the largest difference of each contender's weights from the floor's (without a floor, the first's)."""
    reference = checks.get(_REFERENCE) or next(iter(checks.values()), {})
    return {name: _largest_difference(weights, reference) for name, weights in checks.items()}


def _largest_difference(weights: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    shapes, reference_shapes = ({name: w.shape for name, w in side.items()} for side in (weights, reference))
    if shapes != reference_shapes:
        return float("inf")
    largest = max(float(np.abs(weights[name] - reference[name]).max()) for name in reference)
    # Every comparison with NaN is false, so NaN would count as equal.
    return largest if np.isfinite(largest) else float("inf")


def _build_row(
    workload: Workload, name: str, recording: _Recording, difference: float, load_before: float, device: str
) -> Row:
    return {
        "workload": workload.name,
        "contender": name,
        "s_per_round": statistics.median(recording.seconds),
        "s_per_round_min": min(recording.seconds),
        "cpu_s_per_round": statistics.fmean(recording.cpu_seconds),
        "peak_rss_mb": round(recording.peak_rss_mb, 1),
        "first_round_s": recording.first_round_seconds,
        "repetitions": len(recording.seconds),
        "clients_per_round": workload.clients_per_round,
        "population": workload.population,
        "data": workload.data_source,
        "check_difference": difference,
        "versions": recording.versions,
        "device": device,
        "machine": describe_machine(gpus=gpu_names() if device == "gpu" else ()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load_before": round(load_before, 2),
    }
