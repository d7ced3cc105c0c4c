"""A process that dies at, or a disk that is full from, each call that changes a file of a run of two rounds."""

import dataclasses
import os
import random
import re
import shutil
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.disk import SmallDisk
from tests.faults.trials import Trial
from tests.faults.workers import KILLED, Fault, Workers

pytestmark = pytest.mark.timeout(3000)
ROUNDS = {"rounds": 2, "evaluate_every": 1, "checkpoint_every": 1}
# Who says in which words that there is no room: the system, and SQLite.
NO_ROOM = re.compile("No space left on device|disk is full|disk I/O error|unable to open database file")
# Beside one of each kind; in all scenarios together 300.
RANDOM_CALLS = {"silos": 60, "users": 60, "silos replaced": 60, "users replaced": 60, "users resumed": 50, "tuned": 10}
DIES, DIES_HALFWAY, FULL_ONCE, FULL_FROM_HERE = "k", "t", "o", "s"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A command that something happens to.

    Attributes:
      kind: of the experiment.
      arguments: of its command.
      begins: what is there before: nothing, a whole run, or one that was killed in its second round.
    """

    kind: str
    arguments: tuple[str, ...] = ()
    begins: str = ""


SCENARIOS = {
    "silos": Scenario("silos"),
    "users": Scenario("users"),
    "silos replaced": Scenario("silos", ("--overwrite",), "whole"),
    "users replaced": Scenario("users", ("--overwrite",), "killed"),
    "users resumed": Scenario("users", ("--resume",), "killed"),
    "tuned": Scenario("tuned"),
}
# What a handful of faults is chosen from, by call and file, with the kind of fault.
A_FEW = (
    ("pwrite64", "charges.jsonl", DIES_HALFWAY),
    ("pwrite64", "charges.head", DIES),
    ("rename", "round_N", DIES),
    ("write", "metrics.jsonl", FULL_ONCE),
    ("write", "state.npz", FULL_FROM_HERE),
    ("write", "records/ID.npz.ID", DIES),
)


@pytest.fixture(scope="module")
def templates(workers, make_experiments, tmp_path_factory):
    """A function: what is there before the command of a scenario; None where there is nothing."""
    known = {}

    def look_up(scenario):
        key = (scenario.kind, scenario.begins)
        if scenario.begins and key not in known:
            trial = Trial(make_experiments(scenario.kind, **ROUNDS), tmp_path_factory.mktemp("template") / "trial")
            if scenario.begins == "whole":
                trial.here("0")
            else:
                kill_in_second_round(workers, trial)
            known[key] = trial
        return known.get(key)

    return look_up


def kill_in_second_round(workers: Workers, trial: Trial) -> None:
    """Leaves what a training leaves that is killed after its first round."""
    hold = trial.folder / "hold"
    hold.touch()
    process = workers.start(trial.job("0", hold=str(hold)))
    while not hold.with_name("hold.reached").exists():
        time.sleep(0.01)
    os.kill(process, 9)
    assert workers.wait(process) == KILLED


def kind_of(call: str, path: str, folder: str) -> str:
    """A call, and the kind of the file: its name below the folder without numbers and words that are random."""
    name = re.sub(r"[0-9a-f]{32}", "ID", path.removeprefix(folder))
    return f"{call} {re.sub('[0-9]+', 'N', name)}"


def calls_of(workers: Workers, trial: Trial, arguments: Sequence[str]) -> list[str]:
    """All calls that a command makes to which nothing happens, by kind."""
    log = trial.folder / "calls"
    fault = Fault(str(trial.hurt), log=str(log))
    status = workers.run(trial.job("1", *arguments, fault=dataclasses.asdict(fault)))
    assert status == 0, trial.said
    return [kind_of(*line.split(" ", 1), str(trial.hurt)) for line in log.read_text().splitlines()]


def strike(workers: Workers, trial: Trial, arguments: Sequence[str], at: int, kind: str) -> int:
    """Lets something happen to a command at one of its calls: its exit status."""
    fault = Fault(str(trial.hurt), at, kind)
    return workers.run(trial.job("1", *arguments, fault=dataclasses.asdict(fault)))


def goes_on(trial: Trial, status: int, kind: str, how: str) -> str:
    """Goes on with a run whose command something has happened to: what became of the command."""
    if kind in (DIES, DIES_HALFWAY):
        assert status == KILLED, (status, trial.said)
        outcome = "killed"
    else:
        assert status in (0, 2), (status, trial.said)
        outcome = "refused" if status else "not disturbed"
        if status:
            told = [line for line in trial.said.replace("\r", "\n").split("\n") if NO_ROOM.search(line)]
            assert len(told) == 1 and str(trial.hurt) in told[0], trial.said
            assert "Traceback" not in trial.said
    trial.assert_covered()
    assert trial.problems() == []
    trial.here("2", how)
    trial.assert_equal_to_whole(3, trial.folder.parent)
    trial.assert_covered()
    assert trial.problems() == []
    assert trial.leftovers() == []
    trial.remove_run()
    trial.assert_covered()
    return outcome


def faults_at(call: str) -> tuple[str, ...]:
    """Lists faults of a call: removing needs no room, and only what writes can be cut in two."""
    fails = () if call.startswith(("unlink", "rmdir")) else (FULL_ONCE, FULL_FROM_HERE)
    # The system cuts no write within a page, such as that of a journal's head in its place.
    is_cut = "write" in call.split()[0] and not call.endswith(".head")
    return (DIES, *((DIES_HALFWAY,) if is_cut else ()), *fails)


def sites_of(calls: Sequence[str]) -> dict[str, int]:
    """Numbers the first call of each kind, from 1."""
    found: dict[str, int] = {}
    for number, call in enumerate(calls, 1):
        found.setdefault(call, number)
    return found


@pytest.mark.parametrize("call, file, kind", A_FEW)
def test_a_fault_at_a_call_loses_nothing(
    workers_under_faults, make_experiments, tmp_path, calls_of_silos, call, file, kind
):
    (at, *_) = [at for name, at in calls_of_silos.items() if name.startswith(call) and name.endswith(file)]
    trial = Trial(make_experiments("silos", **ROUNDS), tmp_path / "trial")
    goes_on(trial, strike(workers_under_faults, trial, (), at, kind), kind, "--resume")


@pytest.fixture(scope="module")
def calls_of_silos(workers, compiled, make_experiments, tmp_path_factory):
    """The calls of a training of silos, each with the number of the last one."""
    if compiled[0] is None:
        pytest.skip(compiled[1])
    trial = Trial(make_experiments("silos", **ROUNDS), tmp_path_factory.mktemp("calls") / "trial")
    return {name: number for number, name in enumerate(calls_of(workers, trial, ()), 1)}


@pytest.fixture(scope="module")
def full_disks(start_workers):
    """A process for commands that are not killed, which keeps what it has compiled."""
    return start_workers(forks=False)


@pytest.mark.hurt
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_fault_at_any_kind_of_call_and_at_random_ones_loses_anything(
    workers_under_faults, full_disks, make_experiments, templates, tmp_path, name
):
    scenario = SCENARIOS[name]
    experiment, template = make_experiments(scenario.kind, **ROUNDS), templates(scenario)
    arguments = scenario.arguments
    calls = calls_of(workers_under_faults, Trial(experiment, tmp_path / "calls", template), arguments)
    sites = sites_of(calls)
    generator = random.Random(name)
    places = [(at, kind) for call, at in sites.items() for kind in faults_at(call)]
    for _ in range(RANDOM_CALLS[name]):
        at = generator.randrange(len(calls)) + 1
        places += [(at, kind) for kind in faults_at(calls[at - 1])]
    found: Counter[str] = Counter()
    wrong = []

    def finish(number: int, trial: Trial, status: Future[int]) -> None:
        at, kind = places[number]
        how = ("--resume", "--overwrite")[number % 2]
        try:
            outcome = goes_on(trial, status.result(), kind, how)
        # All that goes wrong is told at the end.
        except Exception as error:
            wrong.append(f"{kind} at {at}, {calls[at - 1]}, {how}: {type(error).__name__}: {str(error)[:1000]}")
            outcome = "wrong"
        found[f"{kind} {outcome}"] += 1
        shutil.rmtree(trial.folder)

    # The next commands run while this process goes on with the runs of those before.
    with ThreadPoolExecutor(1) as killing, ThreadPoolExecutor(1) as filling:
        ahead: deque[tuple[int, Trial, Future[int]]] = deque()
        for number, (at, kind) in enumerate(places):
            trial = Trial(experiment, tmp_path / str(number), template)
            is_killed = kind in (DIES, DIES_HALFWAY)
            pool, workers = (killing, workers_under_faults) if is_killed else (filling, full_disks)
            ahead.append((number, trial, pool.submit(strike, workers, trial, arguments, at, kind)))
            if len(ahead) > 3:
                finish(*ahead.popleft())
        while ahead:
            finish(*ahead.popleft())
    print(*wrong, sep="\n")
    print(f"{name}: {len(calls)} calls, {len(sites)} kinds of them, {len(places)} faults: {dict(found)}")
    assert wrong == []


def trains_on_a_full_disk(trial: Trial, disk: SmallDisk, kilobytes: int) -> bool:
    """Trains with so much room, and returns whether it was refused; with more it goes on, to the same end."""
    disk.leave(kilobytes)
    status = trial.try_here("0")
    said = trial.said
    disk.make_room()
    assert status in (0, 2), said
    if status:
        told = [line for line in said.replace("\r", "\n").split("\n") if NO_ROOM.search(line)]
        assert len(told) == 1 and str(trial.hurt) in told[0] and "Traceback" not in said, said
    trial.assert_covered()
    trial.here("1", "--resume")
    trial.assert_equal_to_whole(2, trial.folder.parent)
    trial.assert_covered()
    assert trial.leftovers() == []
    return bool(status)


@pytest.mark.parametrize("kind, amounts", [("silos", (0, 12, 40)), ("users", (0, 40, 100))])
def test_a_training_on_a_real_full_disk_goes_on_once_there_is_room(
    small_disk, make_experiments, tmp_path, kind, amounts
):
    for kilobytes in amounts:
        name = str(kilobytes)
        trial = Trial(make_experiments(kind, **ROUNDS), tmp_path / name, hurt=small_disk.path / name)
        assert trains_on_a_full_disk(trial, small_disk, kilobytes)


@pytest.mark.hurt
@pytest.mark.parametrize("kind", ["silos", "users", "tuned"])
def test_each_amount_of_room_that_is_too_little_loses_nothing(small_disk, make_experiments, tmp_path, kind):
    refused = 0
    # A page at a time.
    for kilobytes in range(0, 1000, 4):
        name = str(kilobytes)
        trial = Trial(make_experiments(kind, **ROUNDS), tmp_path / name, hurt=small_disk.path / name)
        if not trains_on_a_full_disk(trial, small_disk, kilobytes):
            break
        refused += 1
        shutil.rmtree(trial.hurt)
    print(f"{kind}: refused with {refused} amounts of room, up to {4 * (refused - 1)} KiB")
    assert refused > 10
