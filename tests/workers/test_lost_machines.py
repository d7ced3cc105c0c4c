"""Whole nodes that die, and a head that dies: runs end with the same bits, and nothing is left behind."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.reproduce.reproduce_support import write_school
from tests.workers.runs import experiment_of, trained
from tff_pdp.cli import main
from tff_pdp.training import train as training

pytestmark = [pytest.mark.timeout(1800), pytest.mark.hurt]
ROUNDS = 16
SETTINGS = {"training__rounds": ROUNDS, "training__evaluate_every": ROUNDS}


@pytest.fixture
def undisturbed(clients, tmp_path):
    """The digest of the training without workers."""
    return trained(experiment_of(clients, tmp_path / "undisturbed", "mr_mtl", **SETTINGS), "mr_mtl")


def ray_processes():
    """The processes of Ray on this machine."""
    names = ("raylet", "gcs_server", "ray::")
    return {
        process.pid
        for process in psutil.process_iter(["name", "cmdline"])
        if any(name in " ".join([process.info["name"] or "", *(process.info["cmdline"] or [])[:1]]) for name in names)
    }


@pytest.fixture
def temporary(monkeypatch):
    """The temporary folder of all processes that the test starts; its name is short, as names of sockets are."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def shared_files():
    return set(Path("/dev/shm").iterdir())


def test_killed_nodes_change_nothing(clients, tmp_path, undisturbed, monkeypatch):
    """Two nodes of Ray on this machine; before some rounds, one is killed as a whole and another one joins."""
    from tff_pdp.engines.ray_workers.calls import PoolOptions
    from tff_pdp.engines.ray_workers.engine import set_up_ray

    set_up_ray(PoolOptions())
    import ray
    from ray.cluster_utils import Cluster

    before = ray_processes()
    draw = random.Random(0)
    # Connected before further nodes join: Ray ends a process whose own node is killed.
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        settings = {**SETTINGS, "training__workers": {"num_workers": 2, "address": cluster.address}}
        run, killed = training.run_round, []

        def acting(method, state, number, data):
            if number > 1:
                victim = draw.choice(nodes)
                killed.append(victim)
                nodes.remove(victim)
                threading.Timer(draw.uniform(0, 0.1), cluster.remove_node, (victim, False)).start()
                nodes.append(cluster.add_node(num_cpus=1))
            return run(method, state, number, data)

        monkeypatch.setattr(training, "run_round", acting)
        config = experiment_of(clients, tmp_path / "killed", "mr_mtl", **settings)
        assert trained(config, "mr_mtl") == undisturbed
        assert len(killed) == ROUNDS - 1
    finally:
        ray.shutdown()
        cluster.shutdown()
    _wait_until(lambda: ray_processes() <= before)


def test_a_killed_head_leaves_nothing_and_the_run_resumes(clients, tmp_path, undisturbed, temporary):
    before, files_before = ray_processes(), shared_files()
    config = experiment_of(clients, tmp_path / "killed", "mr_mtl", 2, **SETTINGS)
    path = tmp_path / "killed.yaml"
    path.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "tff_pdp.cli", "train", "--config", str(path), "--algorithm", "mr_mtl"]
    checkpoints = config.algorithm_folder("mr_mtl") / "checkpoints"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_until(lambda: any(checkpoints.glob("round_00000[2-9]*")) or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _wait_until(lambda: ray_processes() <= before)
    assert shared_files() <= files_before
    resumed = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=600, check=False)
    assert resumed.returncode == 0, resumed.stderr
    # The killed head and its workers could not remove their files; the next head and its workers have.
    assert not list(temporary.glob("tff_pdp_*"))
    here = experiment_of(clients, tmp_path / "killed", "mr_mtl", **SETTINGS)
    # The run has ended; what it ends with is read without workers.
    assert trained(here, "mr_mtl", resume=True) == undisturbed


def test_a_reproduction_with_workers_has_the_same_rows_and_leaves_nothing(tmp_path, temporary):
    before = ray_processes()
    (tmp_path / "data" / "school").mkdir(parents=True)
    write_school(tmp_path / "data" / "school" / "school.mat")
    command = ["reproduce", "school", "--data", str(tmp_path / "data"), "--scale", "small", "--methods", "mr_mtl"]
    command += ["--epsilons", "6", "--seeds", "1", "--variants", "default", "--jobs", "1"]
    found = []
    for workers in ("none", "ray:2"):
        output = tmp_path / workers.replace(":", "_")
        assert main([*command, "--output", str(output), "--workers", workers]) == 0
        found.append(json.loads((output / "results.json").read_text()))
        assert len(found[-1]) == 1
    assert found[0] == found[1]
    _wait_until(lambda: ray_processes() <= before)
    assert not list(temporary.glob("tff_pdp_*"))


def _wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
