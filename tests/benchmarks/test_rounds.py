"""The orchestrator with contenders that compute nothing: order, numbers, and everything that can go wrong."""

import datetime
import json
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest

from benchmarks.machine import gpu_names
from benchmarks.rounds import run as rounds
from benchmarks.rounds.contender import DEVICE_VARIABLE, needs_gpu
from benchmarks.rounds.contender_process import ContenderProcess, contender_environment
from benchmarks.rounds.measure import measure
from benchmarks.rounds.workloads import build_workload

# Answers what it is told to: `name log {request or request and round: answer or action}`.
FAKE = """
import json, os, sys, time
name, log, script = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
print(json.dumps({"versions": {"fake": "1"}}), flush=True)
for line in sys.stdin:
    ((request, argument),) = json.loads(line).items()
    with open(log, "a") as file:
        print(name, request, argument, os.getpid(), file=file)
    answer = script.get(f"{request} {argument}", script.get(request, {}))
    if answer == "die":
        sys.exit("out of luck")
    if answer == "hang":
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        with open(log, "a") as file:
            print(name, "child", "-", child.pid, file=file)
        time.sleep(600)
    if answer == "burn":
        deadline = time.process_time() + 0.3
        while time.process_time() < deadline:
            pass
        answer = {"seconds": 1}
    if request == "check":
        import numpy
        numpy.savez(argument, w=numpy.array(answer["w"]))
    print(json.dumps(answer), flush=True)
"""

HONEST = {
    "build": {"seconds": 2},
    "go 0": {"seconds": 9},
    "go 1": {"seconds": 9},
    "go 2": {"seconds": 1},
    "go 3": {"seconds": 5},
    "go 4": {"seconds": 3},
    "inspect": {"finite": True, "update_std": 0.005},
    "check": {"w": [1.0, 2.0]},
}


@pytest.fixture
def run(tmp_path):
    """Measures fakes with these scripts, three recorded rounds each; returns rows, errors and the log."""
    fake = tmp_path / "fake.py"
    fake.write_text(textwrap.dedent(FAKE))
    log = tmp_path / "log"

    def run(scripts, workload="W2-dp", timeout=10.0):
        commands = {
            name: [sys.executable, str(fake), name, str(log), json.dumps({**HONEST, **script})]
            for name, script in scripts.items()
        }
        rows, errors = measure(build_workload(workload), commands, 3, timeout)
        return rows, errors, [line.split() for line in log.read_text().splitlines()]

    yield run
    for line in log.read_text().splitlines():
        assert not is_running(int(line.split()[-1])), f"left behind: {line}"


def is_running(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_rounds_alternate_and_every_pass_reverses_the_order(run):
    _, errors, log = run({"a": {}, "b": {}})
    assert not errors
    went = [(name, int(number)) for name, request, number, _ in log if request == "go"]
    assert went == [
        *(("a", 0), ("b", 0)),
        *(("b", 1), ("a", 1)),
        *(("a", 2), ("b", 2)),
        *(("b", 3), ("a", 3)),
        *(("a", 4), ("b", 4)),
    ]
    requests = [(request, number) for name, request, number, _ in log if name == "a"]
    assert requests[:4] == [("build", "True"), ("prepare", "0"), ("go", "0"), ("prepare", "1")]
    assert [request for request, _ in requests[-2:]] == ["inspect", "check"]


def test_a_row_has_every_key_and_leaves_out_the_warm_up(run):
    (row,), errors, _ = run({"floor-tf": {}})
    assert not errors
    assert (row["workload"], row["contender"]) == ("W2-dp", "floor-tf")
    assert (row["s_per_round"], row["s_per_round_min"], row["repetitions"]) == (3, 1, 3)
    assert row["first_round_s"] == 2 + 9
    assert (row["clients_per_round"], row["population"], row["data"]) == (20, 200, "synthetic")
    assert row["versions"] == {"fake": "1"}
    assert row["peak_rss_mb"] > 1
    assert 0 <= row["cpu_s_per_round"] < 1
    assert row["check_difference"] == 0
    assert "cores" in row["machine"] and row["machine"].endswith("no GPU used")
    assert row["device"] == "cpu"
    assert row["date"] == datetime.datetime.now(datetime.UTC).date().isoformat()
    assert row["load_before"] >= 0
    json.dumps(row)


def test_cpu_time_is_that_of_the_recorded_rounds(run, monkeypatch):
    # Read before and after each of two rounds to warm up and of three that count, which take 0.5 s, 1 s and 3 s.
    clock = iter([0, 8, 20, 29, 30, 30.5, 40, 41, 50, 53])
    monkeypatch.setattr(ContenderProcess, "cpu_seconds", lambda process: next(clock))
    (row,), _, _ = run({"a": {}})
    assert row["cpu_s_per_round"] == 1.5


def test_cpu_time_has_what_the_process_computes(run):
    (row,), _, _ = run({"a": {"go 3": "burn"}})
    # 0.3 s in one of three rounds, whose two readings are off by a step of 10 ms or less each. Beside that a line is
    # read and answered; what is counted twice would be beyond.
    assert (0.3 - 2 * 0.01) / 3 <= row["cpu_s_per_round"] <= 0.1 + 0.03


def test_one_that_fails_is_left_out_and_the_others_go_on(run):
    rows, errors, log = run({"bad": {"go 3": "die"}, "good": {}})
    assert [row["contender"] for row in rows] == ["good"]
    assert "'go'" in errors["bad"] and "out of luck" in errors["bad"]
    assert [number for name, request, number, _ in log if (name, request) == ("good", "go")] == list("01234")


def test_one_that_does_not_start_is_left_out(run, tmp_path):
    run({"a": {}})
    missing = [sys.executable, str(tmp_path / "missing.py")]
    rows, errors = measure(build_workload("W2"), {"missing": missing}, 1, 10.0)
    assert not rows
    assert "'start'" in errors["missing"] and "missing.py" in errors["missing"]


def test_one_that_hangs_is_killed_in_time_with_its_children(run):
    started = time.monotonic()
    rows, errors, log = run({"slow": {"go 1": "hang"}, "good": {}}, timeout=4.0)
    assert time.monotonic() - started < 40
    assert [row["contender"] for row in rows] == ["good"]
    assert errors == {"slow": "no answer to 'go' within 4 s"}
    assert any(request == "child" for _, request, _, _ in log)  # And the fixture looks whether it still runs.


@pytest.mark.parametrize(
    ("weights", "difference"), [([1.0, 2.001], "0.001"), ([1.0, float("nan")], "inf"), ([1.0], "inf")]
)
def test_other_work_is_no_row(run, weights, difference):
    rows, errors, _ = run({"other": {"check": {"w": weights}}, "floor-tf": {}})
    assert [row["contender"] for row in rows] == ["floor-tf"]
    assert errors["other"].endswith(f"differ by {difference}")


def test_rounding_is_the_same_work(run):
    rows, errors, _ = run({"floor-tf": {}, "other": {"check": {"w": [1.0, 2.0 + 5e-7]}}})
    assert not errors
    assert rows[1]["check_difference"] == pytest.approx(5e-7)


def test_weights_must_be_finite_and_noise_as_large_as_planned(run):
    rows, errors, _ = run(
        {
            "infinite": {"inspect": {"finite": False, "update_std": 0.005}},
            "quiet": {"inspect": {"finite": True, "update_std": 0.004}},
        }
    )
    assert not rows
    assert errors["infinite"] == "its weights are not finite"
    assert errors["quiet"] == "the noise of a weight has deviation 0.004, not 0.005"


def test_the_contender_side_of_the_protocol(tmp_path):
    program = tmp_path / "adds_one.py"
    program.write_text(
        textwrap.dedent(
            """
            import numpy
            from benchmarks.rounds import contender

            class Rounds:
                def __init__(self, workload):
                    self.noise, self.weights = workload.noise_multiplier, numpy.zeros(2)
                def prepare(self, round_number):
                    return [0.0, round_number]
                def run(self, prepared):
                    print("libraries may print")
                    self.weights = self.weights + 1 + numpy.array(prepared) + self.noise
                    return {"w": self.weights}

            contender.main(Rounds, ["numpy"])
            """
        )
    )
    command = [sys.executable, "-c", f"import runpy, sys; sys.path.insert(0, '.'); runpy.run_path({str(program)!r})"]
    (row,), errors = measure(build_workload("W2"), {"adds": [*command, '{"name": "W2"}']}, 1, 30.0)
    assert not errors
    assert row["versions"]["numpy"] == np.__version__
    assert 0 < row["s_per_round"] < 1


def test_command_line_writes_the_rows_of_every_size(tmp_path, monkeypatch):
    seen = []

    def fake_measure(workload, commands, repetitions, timeout, on_step, device):
        assert device == "cpu"
        seen.append((workload.name, workload.clients_per_round, workload.population, repetitions, sorted(commands)))
        return [{"workload": workload.name}], {"pfl": "no"}

    monkeypatch.setattr(rounds, "measure", fake_measure)
    output = tmp_path / "new" / "rows.json"
    chosen = ["--contenders", "floor-tf", "--output", str(output)]
    assert rounds.main(["--workloads", "W1,W3", *chosen]) == 0
    assert seen == [("W1", 20, 200, 5, ["floor-tf"]), ("W3", 139, 139, 25, ["floor-tf"])]
    assert json.loads(output.read_text()) == [{"workload": "W1"}, {"workload": "W3"}]

    seen.clear()
    rounds.main(["--scaling", "--repetitions", "1", *chosen])
    assert [row[:3] for row in seen] == [
        *(("W2", 20, 200), ("W2", 100, 200), ("W2", 500, 500)),
        *(("W2", 10, 10), ("W2", 10, 100), ("W2", 10, 1000), ("W2", 10, 10000)),
        *(("W3", 20, 20), ("W3", 100, 100), ("W3", 500, 500)),
    ]


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        rounds.main(["--workloads", "W9"])
    assert "unknown workloads: W9; known: W1" in capsys.readouterr().err


# On a GPU
# --------


def test_contenders_see_the_gpu_only_where_it_is_measured(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    on_cpu, on_gpu = contender_environment(), contender_environment("gpu")
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_gpu["CUDA_VISIBLE_DEVICES"]) == ("", "1")
    assert (on_cpu["JAX_PLATFORMS"], on_gpu["JAX_PLATFORMS"]) == ("cpu", "cuda")
    for environment, needed in ((on_cpu, False), (on_gpu, True)):
        monkeypatch.setenv(DEVICE_VARIABLE, environment[DEVICE_VARIABLE])
        assert needs_gpu() == needed


def test_rows_of_a_gpu_name_the_card_and_contenders_without_one_are_left_out(run, monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.rounds.measure.gpu_names", lambda: ["a card (driver 1)"])
    log = tmp_path / "log"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake = [sys.executable, str(tmp_path / "fake.py"), "fake", str(log), json.dumps(HONEST)]
    floor = [sys.executable, "-m", "benchmarks.rounds.contenders.floor_tf", '{"name": "W2"}']
    rows, errors = measure(build_workload("W2"), {"fake": fake, "floor-tf": floor}, 1, 60.0, device="gpu")
    assert [(row["contender"], row["device"]) for row in rows] == [("fake", "gpu")]
    assert rows[0]["machine"].endswith("; a card (driver 1) used")
    assert "TensorFlow sees no GPU" in errors["floor-tf"]


def test_command_line_on_a_gpu(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(rounds, "measure", lambda *given: (seen.append((sorted(given[1]), given[5])), ([], {}))[1])
    monkeypatch.setattr(rounds, "gpu_names", lambda: ["a card"])
    rounds.main(["--device", "gpu", "--workloads", "W2", "--output", str(tmp_path / "rows.json")])
    ((contenders, device),) = seen
    assert device == "gpu" and {"floor-tf", "ours-loop", "ours-vectorized"} <= set(contenders)
    assert not {"ours-native", "stock-tff"} & set(contenders)
    with pytest.raises(SystemExit):
        rounds.main(["--device", "gpu", "--contenders", "stock-tff"])
    assert "contenders that cannot use a GPU: stock-tff" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        rounds.main(["--device", "gpu"])
    assert capsys.readouterr().err.splitlines()[-1].startswith("python -m benchmarks.rounds.run: error: no GPU can be")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 580.1'\necho 'NVIDIA H100, 580.1'\n")
    smi.chmod(0o755)
    assert gpu_names() == ["NVIDIA H100 (driver 580.1)"] * 2
    smi.write_text("#!/bin/sh\n")
    with pytest.raises(RuntimeError, match="finds none"):
        gpu_names()
