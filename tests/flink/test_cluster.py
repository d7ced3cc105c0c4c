"""What the cluster promises: Python workers are processes of two task managers, and what fails there ends the job."""

import os
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions


class NoteProcess(beam.DoFn):
    """Leaves a file that is named after this process and its parent, and holds the parent's command line."""

    def __init__(self, folder):
        self._folder = folder

    def process(self, element):
        parent = os.getppid()
        (self._folder / f"{os.getpid()}_{parent}").write_bytes(Path(f"/proc/{parent}/cmdline").read_bytes())
        yield element


class Fail(beam.DoFn):
    """Raises an error, or takes the whole worker along."""

    def __init__(self, is_crash):
        self._is_crash = is_crash

    def process(self, element):
        if self._is_crash:
            os._exit(3)
        raise ValueError(f"cannot work on {element}")


def run(cluster, function):
    pipeline = beam.Pipeline(options=PipelineOptions([f"--runner={cluster.runner}", *cluster.flags]))
    _ = pipeline | beam.Create(range(20), reshuffle=False) | beam.Reshuffle() | beam.ParDo(function)
    pipeline.run().wait_until_finish()


def test_workers_are_processes_of_two_task_managers(cluster, tmp_path):
    run(cluster, NoteProcess(tmp_path))
    notes = list(tmp_path.iterdir())
    workers, parents = zip(*(note.name.split("_") for note in notes), strict=True)
    assert len(set(workers)) == len(set(parents)) == 2
    assert str(os.getpid()) not in {*workers, *parents}
    assert all(b"TaskManagerRunner" in note.read_bytes() for note in notes)


@pytest.mark.parametrize(("is_crash", "message"), [(False, "cannot work on"), (True, "FAILED")])
def test_failure_in_a_worker_ends_the_job(cluster, is_crash, message):
    with pytest.raises(RuntimeError, match=message):
        run(cluster, Fail(is_crash))
