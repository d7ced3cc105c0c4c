"""The FEMNIST job on a real cluster: the same bytes as in memory, from both task managers; errors in one line."""

import pytest

from beam_pipelines.__main__ import main
from tests.beam_pipelines.conftest import make_leaf, make_user, run_leaf
from tests.beam_pipelines.dataset.test_femnist import contents

NUM_FILES = 6
USERS_PER_FILE = 10


@pytest.fixture
def raw(write_leaf):
    """Six files, one of them compressed, and an example with a label that is out of range."""
    for file in range(NUM_FILES):
        users = {f"user_{file}_{number}": make_user(100 * file + number) for number in range(USERS_PER_FILE)}
        if file == 0:
            users["user_0_0"]["y"][3] = 7
        write_leaf(make_leaf(users), f"all_data_{file}.json" + (".gz" if file == 1 else ""))


@pytest.mark.parametrize("exchange", ["files", "runner"])
def test_same_bytes_as_in_memory(cluster, raw, options, tmp_path, exchange):
    expected = run_leaf(options(output=tmp_path / "in_memory"))
    before = cluster.job_ids()
    made = run_leaf(options(exchange=exchange, runner=cluster.runner, pipeline_args=cluster.flags))
    assert contents(made.output) == contents(expected.output)
    assert made.manifest.kept.examples == NUM_FILES * USERS_PER_FILE * 12 - 1

    jobs = cluster.job_ids() - before
    assert (len(jobs) > 1) == (exchange == "files")
    # Beam calls operators that run Python code MapPartition; this stage has a task per file.
    work = {
        name: reads
        for job in jobs
        for name, reads in cluster.records_read(job).items()
        if "MapPartition at" in name and "read_users" in name and "read_users/tasks" not in name
    }
    (reads,) = work.values()
    assert len(reads) == 2 and min(reads.values()) > 0 and sum(reads.values()) == NUM_FILES, work


def test_damaged_file_is_one_line(cluster, raw, write_leaf, tmp_path, capfd):
    path = write_leaf(make_leaf({"a": make_user(0)}), "damaged.json.gz") / "damaged.json.gz"
    path.write_bytes(path.read_bytes()[:-30])
    arguments = ["femnist", "--input", str(path.parent), "--output", str(tmp_path / "clients")]
    assert main([*arguments, "--input_shape", "2", "2", "1", "--runner", cluster.runner, *cluster.flags]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "beam_pipelines femnist: " in line]
    assert len(lines) == 1 and "damaged.json.gz: truncated or damaged gzip" in lines[0]
    assert not (tmp_path / "clients").exists()
