import dataclasses
import functools
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.reproduce.reproduce_support import BuildFakeRunner
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.workers import _take, run_jobs


@pytest.fixture(autouse=True)
def interruptible():
    """Jobs in the background of a shell inherit that Ctrl-C is ignored; here it is not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def build(tmp_path):
    def made(**how):
        folder = tmp_path / "ran"
        folder.mkdir(exist_ok=True)
        return BuildFakeRunner(folder, **how)

    return made


@dataclasses.dataclass(frozen=True)
class Noting:
    """Runs jobs, and leaves a file once it is closed."""

    folder: Path

    def __call__(self, job):
        return not (self.folder / "closed").exists()

    def close(self):
        (self.folder / "closed").touch()


def jobs(*methods, seeds=2):
    return [Job("default", method, 6.0, seed) for method in methods for seed in range(seeds)]


def is_running(process):
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


def test_every_job_is_run_once_and_its_result_comes_back(build, tmp_path):
    runner, wanted = build(), jobs("local_only", "fed_avg", "mr_mtl")
    finished = list(run_jobs(wanted, runner, 2, tmp_path / "log"))
    assert sorted(map(str, (one.job for one in finished))) == sorted(map(str, wanted))
    assert all(one.result.job == one.job and not one.error for one in finished)
    assert len(runner.runs()) == len(wanted)


def test_a_runner_is_closed_after_its_last_job(tmp_path):
    finished = list(run_jobs(jobs("local_only"), functools.partial(Noting, tmp_path), 1, tmp_path / "log"))
    assert [one.result for one in finished] == [True, True]
    assert (tmp_path / "closed").exists()


def test_a_worker_takes_its_own_group_then_one_that_nobody_is_at_then_any():
    fed_avg, local, mr_mtl = jobs("fed_avg", seeds=1) + jobs("local_only", seeds=1) + jobs("mr_mtl", seeds=1)

    def take(group, others_group, *waiting):
        one, other = SimpleNamespace(group=group, job=None), SimpleNamespace(group=others_group, job="at work")
        left = list(waiting)
        taken = _take(left, one, [one, other])
        assert {taken, *left} == set(waiting)
        return taken

    assert take(mr_mtl.group, fed_avg.group, fed_avg, local, mr_mtl) == mr_mtl
    assert take(None, fed_avg.group, fed_avg, local, mr_mtl) == local
    assert take(None, fed_avg.group, fed_avg) == fed_avg


def test_a_job_that_raises_or_kills_its_process_costs_no_other_job(build, tmp_path):
    runner = build(fails=("fed_avg",), kills=("ditto",))
    finished = list(run_jobs(jobs("local_only", "fed_avg", "ditto", "mr_mtl"), runner, 2, tmp_path / "log"))
    errors = {one.job: one.error for one in finished}
    assert len(errors) == 8
    for job, error in errors.items():
        if job.method == "fed_avg":
            assert error.strip().endswith("ValueError: no luck with fed_avg")
        elif job.method == "ditto":
            assert error == "its process ended with status -9"
        else:
            assert not error


def test_what_workers_print_is_in_the_log_and_not_on_the_terminal(tmp_path, capfd):
    list(run_jobs(jobs("local_only", seeds=1), _BuildPrinter(), 1, tmp_path / "log"))
    assert "printed by a worker" in (tmp_path / "log").read_text()
    assert capfd.readouterr() == ("", "")


def test_closing_ends_the_processes_at_work_and_those_that_wait(build, tmp_path):
    runner = build(slow=("ditto",))
    running = run_jobs(jobs("local_only", "ditto", seeds=1), runner, 2, tmp_path / "log")
    assert next(running).job.method == "local_only"
    deadline = time.monotonic() + 30
    while "ditto" not in runner.processes() and time.monotonic() < deadline:
        time.sleep(0.01)
    running.close()
    assert not any(is_running(process) for group in runner.processes().values() for process in group)


class _Interrupting:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_inside_a_destructor_is_not_lost(build, tmp_path):
    """Python ignores exceptions there, KeyboardInterrupt included; the loop would go on to wait for the slow job."""
    runner = build(slow=("ditto",), seconds=20)
    with pytest.raises(KeyboardInterrupt):
        for _ in run_jobs(jobs("local_only", "ditto", seeds=1), runner, 2, tmp_path / "log"):
            _Interrupting()
    assert not any(is_running(process) for group in runner.processes().values() for process in group)


def test_ctrl_c_does_not_interrupt_the_loops_body(build, tmp_path):
    """An outcome is kept as a whole or not at all, and no worker is left behind."""
    kept = []
    with pytest.raises(KeyboardInterrupt):
        for finished in run_jobs(jobs("local_only", "fed_avg"), build(), 1, tmp_path / "log"):
            signal.raise_signal(signal.SIGINT)
            kept.append(finished.job)
    assert len(kept) == 1


@dataclasses.dataclass(frozen=True)
class _BuildPrinter:
    def __call__(self):
        return lambda job: print("printed by a worker", flush=True)
