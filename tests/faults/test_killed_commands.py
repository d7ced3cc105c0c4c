"""Commands that are killed at random moments: nothing is drawn that is not on record, and what goes on is the same."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.export import exporter
from serving.saved_model import layout
from serving.saved_model.checks import check_complete, check_export
from tests.faults import draws
from tests.faults.trials import Experiment, Trial
from tests.faults.workers import KILLED, Job, StandIn, Workers

pytestmark = pytest.mark.timeout(3000)
# Until a moment is found at which the command was still running.
_ATTEMPTS = 8


def measure(workers: Workers, trial: Trial, job: Job) -> tuple[float, float]:
    """Seconds of a command until its first draw, and from there to its end."""
    started = time.monotonic()
    process = workers.start(job)
    wait_for_draw(process, trial.log, 0)
    drawn = time.monotonic()
    assert workers.wait(process) == 0, trial.said
    return drawn - started, time.monotonic() - drawn


def wait_for_draw(process: int, log: Path, size: int) -> None:
    """Waits until the log of draws has grown, or the process has ended."""
    while not (log.exists() and log.stat().st_size > size) and not has_ended(process):
        time.sleep(0.001)


def has_ended(process: int) -> bool:
    """Tells whether a process of the workers has ended, and is not waited for yet."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def killed(
    workers: Workers, make: Callable[[], Trial], job: Callable[[Trial], Job], seconds: tuple[float, float], seed: str
) -> Trial:
    """A trial whose command was killed while it was running."""
    generator = random.Random(seed)
    for _ in range(_ATTEMPTS):
        trial = make()
        if kill(workers, trial, job(trial), seconds, generator):
            return trial
    raise AssertionError(f"the command always ended before it was killed, {seconds} seconds after its start")


def kill(workers: Workers, trial: Trial, job: Job, seconds: tuple[float, float], generator: random.Random) -> bool:
    """Kills a command at a random moment, mostly after its first draw; false where it ended before."""
    size = trial.log.stat().st_size if trial.log.exists() else 0
    process = workers.start(job)
    if generator.random() < 0.15:
        time.sleep(generator.uniform(0, seconds[0]))
    else:
        wait_for_draw(process, trial.log, size)
        time.sleep(generator.uniform(0, seconds[1]))
    os.kill(process, 9)
    return workers.wait(process) == KILLED


def hurt_run(
    workers: Workers, experiment: Experiment, folder: Path, seconds: tuple[float, float], every: int, seed: str
) -> Counter[str]:
    """Kills the command that makes a run, perhaps twice, and goes on by resuming or by starting again."""
    numbers = iter(range(_ATTEMPTS))
    trial = killed(
        workers,
        lambda: Trial(experiment, folder / f"{seed} {next(numbers)}", checkpoint_every=every),
        lambda trial: trial.job("0"),
        seconds,
        seed,
    )
    found, labels = Counter({"killed": 1}), 1
    generator = random.Random(f"after {seed}")
    trial.assert_covered()
    assert trial.problems() == []
    goes_on = generator.choice(["--resume", "--overwrite"])
    if generator.random() < 0.3:
        found["killed"] += kill(workers, trial, trial.job(str(labels), goes_on), seconds, generator)
        labels += 1
        trial.assert_covered()
        assert trial.problems() == []
        goes_on = generator.choice(["--resume", "--overwrite"])
    trial.here(str(labels), goes_on)
    labels += 1
    trial.assert_equal_to_whole(labels, folder)
    found[goes_on] += 1
    keys = len(draws.keys(trial.log))
    found["with two keys drawn from, or more"] += keys > 1
    trial.assert_covered()
    assert trial.problems() == []
    assert trial.leftovers() == []
    # What the registry says by itself is no less.
    trial.remove_run()
    trial.assert_covered()
    return found


@pytest.fixture(scope="module")
def seconds_of(workers, make_experiments, tmp_path_factory):
    """A function: how long the command of an experiment takes, to its first draw and from there."""
    known = {}

    def look_up(experiment):
        key = experiment.kind, experiment.config.training.rounds
        if key not in known:
            for number in range(2):  # The first waits until the workers have imported TensorFlow.
                trial = Trial(experiment, tmp_path_factory.mktemp("measured") / str(number), checkpoint_every=10)
                known[key] = measure(workers, trial, trial.job("0"))
        return known[key]

    return look_up


@pytest.mark.parametrize("kind", ["silos", "users"])
def test_a_killed_training_has_all_that_it_drew_on_record_and_ends_the_same(
    workers, make_experiments, seconds_of, tmp_path, kind
):
    experiment = make_experiments(kind, rounds=24, evaluate_every=6)
    for number in range(2):
        hurt_run(workers, experiment, tmp_path, seconds_of(experiment), 10, f"{kind} {number}")


@pytest.mark.hurt
@pytest.mark.parametrize("every", [1, 10, 1000])
@pytest.mark.parametrize("kind, times", [("silos", 10), ("users", 10), ("tuned", 6)])
def test_no_kill_at_a_random_moment_loses_a_draw_or_changes_a_result(
    workers, make_experiments, seconds_of, tmp_path, kind, times, every
):
    # Of 200 rounds, two are reserved at a time.
    experiment = make_experiments(kind, rounds=24 if kind == "tuned" else 200, evaluate_every=20)
    found = Counter()
    for number in range(times):
        found += hurt_run(workers, experiment, tmp_path, seconds_of(experiment), every, f"{kind} {every} {number}")
    print(f"{kind}, checkpoint_every {every}: {dict(found)}")
    assert found["killed"] >= times


@pytest.fixture(scope="module")
def exported(make_experiments, tmp_path_factory):
    """A function: a trial of a kind, trained and exported."""

    def make(kind):
        trial = Trial(make_experiments(kind, rounds=2), tmp_path_factory.mktemp("exported") / kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporter, "FreshProcess", StandIn)
            trial.here("0")
            trial.here("0", command="export")
        return trial

    return make


@pytest.mark.hurt
@pytest.mark.parametrize("kind, times", [("silos", 8), ("users", 6)])
def test_no_kill_of_a_fit_loses_what_it_drew(workers, exported, tmp_path, monkeypatch, kind, times):
    monkeypatch.setattr(exporter, "FreshProcess", StandIn)
    template, found = exported(kind), Counter()
    experiment = template.experiment
    measured = Trial(experiment, tmp_path / "measured", template)
    seconds = measure(workers, measured, measured.job("1", command="personalize"))
    for number in range(times):
        numbers = iter(range(_ATTEMPTS))
        trial = killed(
            workers,
            lambda number=number, numbers=numbers: Trial(experiment, tmp_path / f"{number} {next(numbers)}", template),
            lambda trial: trial.job("1", command="personalize"),
            seconds,
            f"fit {kind} {number}",
        )
        found["killed"] += 1
        found["killed after it drew"] += draws.fits(trial.log)
        trial.assert_covered()
        assert trial.problems() == []
        trial.here("2", "--replace", command="personalize")
        trial.assert_covered()
        assert trial.problems() == []
        versions = layout.published_versions(trial.config.export_folder)
        for version in versions.values():
            check_export(version)
            check_complete(version)
        assert len(versions) >= 2
        trial.remove_run()
        trial.assert_covered()
    print(f"personalize of {kind}: {dict(found)}")
