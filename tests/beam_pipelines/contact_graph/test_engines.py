"""The whole job: same bytes on every engine and as by plain loops, and after it was killed."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from beam_pipelines.contact_graph.job import run_contact_graph_job
from beam_pipelines.engine import run as staged
from tests.beam_pipelines.contact_graph.graph_support import (
    contents,
    job_of,
    options_of,
    read_rows,
    run_in_memory,
    small_town,
)
from tests.places import ROOT
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SPLITS, Manifest

OPTIONS = {"num_shards": 3, "num_windows": 2, "layout": "summary", "num_slots": 2, "validation_fraction": 0.3}
ENGINES = {
    "runner": {"exchange": "runner"},
    "processes": {
        "exchange": "runner",
        "pipeline_args": ("--direct_num_workers=2", "--direct_running_mode=multi_processing"),
    },
}


@pytest.fixture
def source(tmp_path):
    folder = small_town().write(tmp_path / "input")
    with open(folder / "population_network.csv", "a") as file:
        file.write("1,1,9,0,5,1,1\n1,3,9,0,five,1,1\n")
    return folder


@pytest.fixture
def finished(source, tmp_path):
    """What the job writes when nothing gets in its way."""
    return run_contact_graph_job(options_of(source, tmp_path, **OPTIONS)).output


# Two processes that import Beam; a pipeline of Beam's engine tests runs on them in make test.
SLOW = {"processes": pytest.mark.all}


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, id=name, marks=SLOW.get(name, ())) for name, engine in ENGINES.items()]
)
def test_same_bytes_on_every_engine(source, finished, tmp_path, engine):
    options = options_of(source, tmp_path, output=tmp_path / "again", **OPTIONS, **engine)
    assert contents(run_contact_graph_job(options).output) == contents(finished)


def test_same_rows_as_by_plain_loops(source, finished, tmp_path):
    job = job_of(options_of(source, tmp_path, **OPTIONS))
    counts = run_in_memory(job.stages, tmp_path / "staging")
    manifest = Manifest.load(finished)
    assert (manifest.read, manifest.kept, manifest.dropped) == (counts.read, counts.kept, counts.dropped)
    assert manifest.rows == counts.rows and manifest.row_influence == job.row_influence
    assert manifest.rows["population_network"].read == len(small_town().contacts) + 2
    assert sum(manifest.rows["population_network"].dropped.values()) > 2
    shards = {name: content for name, content in contents(tmp_path / "staging").items() if name.startswith("shards")}
    assert shards.items() <= contents(finished).items()
    dataset = ClientDataset.open(finished, verify=True)
    rows = read_rows(tmp_path / "staging", job)
    assert dataset.client_ids == ("east", "west")
    for client in dataset.client_ids:
        for split in SPLITS:
            examples = dataset.load(client, split)
            expected = sorted((row.x, row.y) for row in rows.values() if (row.client, row.split) == (client, split))
            stored = [
                ((255 * x).round().astype("uint8").tobytes(), int(y))
                for x, y in zip(examples.x, examples.y, strict=True)
            ]
            assert sorted(stored) == expected and expected


# All tasks but the first, before which nothing is done.
TASKS = [
    *(("read_people", number) for number in range(1, 5)),
    *((stage, number) for stage in ("join_people", "describe_people") for number in range(2)),
    *(("order_people", 0), ("read_contacts", 0), ("write_rows", 0), ("write_rows", 1)),
]


@pytest.mark.parametrize(
    ("stage", "number", "moment"),
    [
        pytest.param("describe_people", 1, "begin", marks=pytest.mark.all),
        ("write_rows", 0, "write"),
        *(pytest.param(*task, "begin", marks=pytest.mark.hurt) for task in TASKS if task != ("describe_people", 1)),
    ],
)
def test_killed_job_goes_on(source, tmp_path, monkeypatch, stage, number, moment):
    options = options_of(source, tmp_path)
    killed = kill(options, stage, number, moment)
    done = watch_tasks(monkeypatch)
    output = run_contact_graph_job(options).output
    assert killed and not killed & set(done)
    assert (stage, number) in done
    again = options_of(source, tmp_path, output=tmp_path / "again")
    # Nothing else either: no part of a file that it was writing.
    assert contents(output) == contents(run_contact_graph_job(again).output)


def test_stopped_job_with_other_options_begins_anew(source, tmp_path, monkeypatch):
    options = options_of(source, tmp_path, seed=0)
    stopped = watch_tasks(monkeypatch, stop_at=("write_rows", 1))
    with pytest.raises(RuntimeError, match="stopped here"):
        run_contact_graph_job(options)
    changed = dataclasses.replace(options, seed=1)
    done = watch_tasks(monkeypatch)
    output = run_contact_graph_job(changed).output
    assert stopped and set(stopped) < set(done)
    again = dataclasses.replace(changed, output=tmp_path / "again")
    assert contents(output) == contents(run_contact_graph_job(again).output)


def kill(options, stage, number, moment):
    """Runs a job until it dies; the tasks that it had done."""
    output = Path(options.output)
    job = subprocess.run(
        [
            *(sys.executable, "-m", "tests.beam_pipelines.contact_graph.killed_job"),
            *(str(options.input), str(output), stage, str(number), moment),
        ],
        cwd=ROOT,
        capture_output=True,
        timeout=100,
    )
    assert job.returncode == -signal.SIGKILL, job.stderr.decode()
    assert not output.exists()
    reports = (output.parent / f".{output.name}.unfinished" / ".reports").glob("*/*.json")
    return {(path.parent.name, int(path.stem)) for path in reports}


def watch_tasks(monkeypatch, stop_at=None):
    """The tasks that are done from now on, up to one that ends the job."""
    monkeypatch.undo()
    done = []

    class Watched(staged.TaskRun):
        def report(self):
            task = (self._stage.name, self._context.number)
            if task == stop_at:
                raise RuntimeError("stopped here")
            super().report()
            done.append(task)

    monkeypatch.setattr(staged, "TaskRun", Watched)
    return done
