"""Workers in processes of their own end with their job, also where the job is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beam_pipelines.engine import tasks
from beam_pipelines.engine.run import run_stages
from tests.beam_pipelines.engine.engine_support import stages_of
from tests.places import ROOT

PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


def endless_read_task(task, context):
    """Leaves the number of its process, and goes on for longer than any test."""
    (context.folder / f"process-{os.getpid()}").touch()
    time.sleep(600)
    yield from ()


def is_running(number: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("exchange", ["files", "runner"])
def test_workers_of_a_killed_job_are_gone_at_once(tmp_path, exchange):
    (tmp_path / ".reports").mkdir()
    command = [sys.executable, "-m", __name__, str(tmp_path), exchange]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (workers := [int(path.name.removeprefix("process-")) for path in tmp_path.glob("process-*")]):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert all(is_running(worker) for worker in workers)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    deadline = time.monotonic() + 5
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives its job"
        time.sleep(0.05)


def test_a_process_that_no_job_has_started_goes_on():
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tasks.end_with(stranger.pid)
    tasks.end_with(os.getpid())
    stranger.kill()
    stranger.communicate()
    # Had this process been taken for a worker of that job, it would be over.
    time.sleep(0.2)


if __name__ == "__main__":
    folder, exchange = sys.argv[1:]
    flags = ["--runner=FnApiRunner", *PROCESSES]
    run_stages(stages_of(endless_read_task), Path(folder), is_staged=exchange == "files", flags=flags)
