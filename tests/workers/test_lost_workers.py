"""Workers and nodes that die or are slow cost time, and nothing else."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest

from tests.tiers import amount
from tests.workers.runs import experiment_of, trained
from tff_pdp.training import train as training
from tff_pdp.training.record.charges import read_charges

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("lent_workers")]
ROUNDS = 12
SETTINGS = {"training__rounds": ROUNDS, "training__evaluate_every": ROUNDS}


@pytest.fixture
def undisturbed(clients, tmp_path):
    """The digest of the training without workers."""
    return trained(experiment_of(clients, tmp_path / "undisturbed", "mr_mtl", **SETTINGS), "mr_mtl")


def before_rounds(monkeypatch, act):
    """Calls `act(round number)` before each round."""
    run = training.run_round

    def acting(method, state, number, data):
        act(number)
        return run(method, state, number, data)

    monkeypatch.setattr(training, "run_round", acting)


def check_ledger(config):
    """No round was drawn anew. The digest of a training includes its ledger, which has every round once."""
    charges = read_charges(config.algorithm_folder("mr_mtl"))
    assert charges.through_round == ROUNDS
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


@pytest.mark.all
def test_killed_workers_change_nothing(clients, tmp_path, engines, monkeypatch, undisturbed):
    draw = random.Random(0)
    killed = []

    def kill(number):
        if killed or number > 1:
            victim = draw.choice(pids(engines, 2))
            delay = draw.uniform(0, 0.05)
            threading.Timer(delay, os.kill, (victim, signal.SIGKILL)).start()
            killed.append(victim)

    config = experiment_of(clients, tmp_path / "killed", "mr_mtl", 2, **SETTINGS)
    trained(experiment_of(clients, tmp_path / "warm", "mr_mtl", 2, training__rounds=1), "mr_mtl")
    with monkeypatch.context() as patch:
        before_rounds(patch, lambda number: kill(number) if number % amount(test=6, all=4) == 0 else None)
        assert trained(config, "mr_mtl") == undisturbed
    assert killed
    check_ledger(config)


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
            assert trained(config, "mr_mtl") == undisturbed
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - started < 600
    check_ledger(config)
