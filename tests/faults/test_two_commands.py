"""Two commands on one run at once: one of them works, the other ends with one sentence."""

import collections
import contextlib
import time

import pytest

from serving.export import exporter
from tests.faults import draws
from tests.faults.trials import Trial
from tests.faults.workers import StandIn, Workers
from tests.tiers import amount
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.run_folder import read_metrics

pytestmark = pytest.mark.timeout(600)
ROUNDS = {"rounds": 3, "evaluate_every": 1, "checkpoint_every": 1}


@contextlib.contextmanager
def held(workers: Workers, trial: Trial, label: str, *arguments: str):
    """A training that waits in its second round until the block ends; then it ends well."""
    hold = trial.folder / f"hold {label}"
    hold.touch()
    process = workers.start(trial.job(label, *arguments, hold=str(hold)))
    deadline = time.monotonic() + 120
    while not hold.with_name(f"{hold.name}.reached").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield process
    finally:
        hold.unlink()
        status = workers.wait(process)
    assert status == 0, trial.said


def assert_refused(trial: Trial, process: int, *arguments: str, command: str = "") -> None:
    """Another command on the trial's run ends with the sentence that names the process and the folder."""
    other = trial.beside()
    assert other.try_here("other", *arguments, command=command) == 2
    sentence = f"process {process} writes to {trial.run}: wait until that process has ended, or stop it"
    assert [line for line in other.said.splitlines() if "writes to" in line] == [
        f"tff-pdp {command or other.experiment.command}: {sentence}"
    ]
    assert "Traceback" not in other.said


def assert_each_round_once(trial: Trial) -> None:
    """One result of each round, and nothing spent beside what one run spends."""
    rounds = trial.config.training.rounds
    assert [row["round"] for row in read_metrics(trial.run)] == list(range(1, rounds + 1))
    assert draws.rounds(trial.log) == dict.fromkeys(range(1, rounds + 1), 1)
    charges = read_charges(trial.run)
    assert charges is not None and charges.is_closed and charges.ledger is not None
    plan = trial.experiment.method.plan
    spent = {scope: collections.Counter() for scope in plan.budgets}
    for entry in charges.ledger.entries:
        spent[entry.scope][entry.event] += entry.count
    # Besides, once for all rounds, how far their noise is from an ideal one.
    noise = {scope: collections.Counter([event]) for scope, event in plan.drawn_noise.items()}
    assert spent == {scope: drawn + noise[scope] for scope, drawn in trial.drawn().items()}
    assert trial.problems() == []


@pytest.mark.parametrize("kind", ["silos", "users"])
def test_a_second_training_is_refused_while_one_runs(workers, make_experiments, tmp_path, kind):
    trial = Trial(make_experiments(kind, **ROUNDS), tmp_path / "trial")
    with held(workers, trial, "0") as process:
        for arguments in ((), ("--resume",), ("--overwrite",)):
            assert_refused(trial, process, *arguments)
    trial.assert_equal_to_whole(1, tmp_path)
    assert_each_round_once(trial)


def test_a_search_is_refused_while_a_training_runs_and_the_other_way_round(workers, make_experiments, tmp_path):
    trial = Trial(make_experiments("silos", **ROUNDS), tmp_path / "trial")
    searching = make_experiments("searched", **ROUNDS)
    with held(workers, trial, "0") as process:
        # Whoever searches, and whoever trains without.
        assert_refused(trial.as_other(searching), process)
        assert_refused(trial.as_other(searching), process, "--overwrite")
    assert_each_round_once(trial)
    other = Trial(searching, tmp_path / "other")
    with held(workers, other, "0") as process:
        assert_refused(other.as_other(trial.experiment), process)
        assert_refused(other.as_other(trial.experiment), process, "--overwrite")
    other.assert_covered()
    assert other.problems() == []


def test_an_export_and_a_fit_are_refused_while_a_training_runs(workers, make_experiments, tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "FreshProcess", StandIn)
    trial = Trial(make_experiments("silos", **ROUNDS), tmp_path / "trial")
    trial.here("0")
    trial.here("0", command="export")
    with held(workers, trial, "1", "--overwrite") as process:
        assert_refused(trial, process, command="export")
        assert_refused(trial, process, command="personalize")
    assert draws.fits(trial.log) == 0
    trial.assert_covered()
    trial.here("1", command="export")
    assert len(list(trial.config.export_folder.glob("[0-9]*"))) == 2


def test_of_two_trainings_that_start_at_once_one_runs(workers, make_experiments, tmp_path):
    refused = 0
    for number in range(amount(test=2, all=6)):
        trial = Trial(make_experiments("silos", **ROUNDS), tmp_path / str(number))
        other = trial.beside()
        processes = [workers.start(one.job(label)) for label, one in (("0", trial), ("1", other))]
        statuses = [workers.wait(process) for process in processes]
        assert sorted(statuses) == [0, 2], (trial.said, other.said)
        said = (trial, other)[statuses.index(2)].said
        first = processes[statuses.index(0)]
        assert f"process {first} writes to {trial.run}" in said or f"{trial.run} holds a run already" in said
        refused += "writes to" in said
        trial.assert_equal_to_whole(2, tmp_path)
        assert_each_round_once(trial)
    assert refused


def test_commands_that_begin_at_once_release_statistics_once(workers, make_experiments, tmp_path):
    for number in range(amount(test=2, all=6)):
        trial = Trial(make_experiments("tuned", **ROUNDS), tmp_path / str(number))
        other = trial.beside()
        processes = [workers.start(one.job(label)) for label, one in (("0", trial), ("1", other))]
        statuses = [workers.wait(process) for process in processes]
        assert sorted(statuses) == [0, 2], (trial.said, other.said)
        assert draws.statistics(trial.log) == 1
        trial.assert_covered()
