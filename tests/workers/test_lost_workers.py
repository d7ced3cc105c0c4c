"""Workers that die or are slow cost time, and nothing else."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest

from tests.workers.runs import STEPS, experiment_of, trained
from tff_pdp.training import train as training
from tff_pdp.training.record.charges import read_charges

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("lent_workers")]
ROUNDS = 16
SETTINGS = {"training__rounds": ROUNDS, "training__evaluate_every": ROUNDS}


@pytest.fixture
def undisturbed(clients, tmp_path):
    """A function: the digest of a training without workers."""
    return lambda name: trained(experiment_of(clients, tmp_path / "undisturbed", name, **SETTINGS), name)


def before_rounds(monkeypatch, act):
    """Calls `act(round number)` before each round."""
    run = training.run_round

    def acting(method, state, number, data):
        act(number)
        return run(method, state, number, data)

    monkeypatch.setattr(training, "run_round", acting)


def check_ledger(config, name, rounds=ROUNDS):
    """No round was drawn anew. The digest of a training includes its ledger, which has every round once."""
    charges = read_charges(config.algorithm_folder(name))
    assert charges.through_round == rounds
    assert charges.attempt.number == 0


def pids(engines, num_workers):
    """Process numbers of the workers that have started, of the lent engine with this number of workers."""
    _, kept = engines
    engine = next(
        engine
        for (options, parallelism, _), engine in kept.items()
        if (options.num_workers, parallelism) == (num_workers, "loop")
    )
    return engine.pool.pids()


@pytest.mark.parametrize(
    ("name", "every"),
    [
        pytest.param("mr_mtl", 4, marks=pytest.mark.all),
        pytest.param("mr_mtl", 1, marks=pytest.mark.hurt),
        pytest.param("centaur", 1, marks=pytest.mark.hurt),
    ],
)
def test_killed_workers_change_nothing(clients, tmp_path, engines, monkeypatch, undisturbed, name, every):
    """One of two workers is killed at some moment of every round, or of some rounds."""
    draw = random.Random(0)
    killed = []

    def kill(number):
        if number % every == 0:
            victim = draw.choice(pids(engines, 2))
            killed.append(victim)
            threading.Timer(draw.uniform(0, 0.05), send, [victim, signal.SIGKILL]).start()

    config = experiment_of(clients, tmp_path / "killed", name, 2, **SETTINGS)
    trained(experiment_of(clients, tmp_path / "warm", name, 2, training__rounds=1), name)
    with monkeypatch.context() as patch:
        before_rounds(patch, kill)
        assert trained(config, name) == undisturbed(name)
    assert len(killed) >= ROUNDS // every
    check_ledger(config, name)


@pytest.mark.all
def test_a_stopped_worker_does_not_stop_a_run(clients, tmp_path, engines, monkeypatch, undisturbed):
    """A worker that gets no processor time at all is slower than any factor."""
    trained(experiment_of(clients, tmp_path / "warm", "mr_mtl", 2, training__rounds=1), "mr_mtl")
    stopped = []

    def stop(number):
        if number == 3:
            stopped.append(pids(engines, 2)[0])
            os.kill(stopped[0], signal.SIGSTOP)

    config = experiment_of(clients, tmp_path / "stopped", "mr_mtl", 2, **SETTINGS)
    started = time.monotonic()
    try:
        with monkeypatch.context() as patch:
            before_rounds(patch, stop)
            assert trained(config, "mr_mtl") == undisturbed("mr_mtl")
    finally:
        for pid in stopped:
            send(pid, signal.SIGCONT)
    assert time.monotonic() - started < 600
    check_ledger(config, "mr_mtl")


@contextlib.contextmanager
def slowed_ten_times(started):
    """Gives the processes whose numbers get into the list `started` 10 of every 100 milliseconds."""
    ended = threading.Event()

    def alternate():
        while not ended.wait(0.01):
            for pid in started:
                send(pid, signal.SIGSTOP)
            ended.wait(0.09)
            for pid in started:
                send(pid, signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def send(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.mark.all
def test_a_slow_worker_changes_nothing_and_is_replaced(clients, tmp_path, engines, monkeypatch, caplog):
    """A worker gets a tenth of a processor from the second round on: others take over its clients, and its place."""
    # The slow worker takes seconds for what the other one does in some tenths of a second.
    rounds, steps = 8, {**STEPS, "local_steps": 150}
    heavy = {"training__rounds": rounds, "training__evaluate_every": rounds, "algorithms": {"mr_mtl": steps}}
    whole = trained(experiment_of(clients, tmp_path / "whole", "mr_mtl", **heavy), "mr_mtl")
    config = experiment_of(clients, tmp_path / "slow", "mr_mtl", 2, **heavy)
    slow = []

    def slow_down(number):
        if number == 2:
            slow.append(pids(engines, 2)[0])

    with slowed_ten_times(slow), monkeypatch.context() as patch:
        before_rounds(patch, slow_down)
        assert trained(config, "mr_mtl") == whole
    late = [record for record in caplog.records if "is late" in record.getMessage()]
    assert late, "the slow worker was waited for"
    assert slow[0] not in pids(engines, 2)
    check_ledger(config, "mr_mtl", rounds)
