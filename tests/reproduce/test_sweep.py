import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.places import ROOT
from tests.reproduce.reproduce_support import BuildFakeRunner, build_reproduction, fake_row
from tff_pdp.errors import DataError
from tff_pdp.lock import only_writer
from tff_pdp.reproduce.sweep import FAILURES_FILE, PARTIAL_FILE, ResultStore, sweep


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def build(tmp_path):
    def made(name="ran", **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return BuildFakeRunner(folder, **how)

    return made


def quiet_sweep(reproduction, runner):
    return sweep(reproduction, runner, 2)


def is_group_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def start_sweep(folder, output, runner, seeds=2):
    script = folder / "script.py"
    script.write_text(
        "from pathlib import Path, PosixPath\n"
        "from tests.reproduce.reproduce_support import BuildFakeRunner, build_reproduction\n"
        "from tff_pdp.reproduce.sweep import sweep\n"
        "if __name__ == '__main__':\n"
        f"    sweep(build_reproduction(Path({str(output)!r}), seeds={seeds}), {runner!r}, 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # A session of its own: Ctrl-C is for all of its processes, and for none of the tests'.
    command = [sys.executable, str(script)]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, env=environment)


def results(output, name="results.json"):
    return json.loads((output / name).read_text())


def test_rows_are_method_epsilon_seed_metric_value_and_come_in_order(output, build):
    reproduction = build_reproduction(output)
    quiet_sweep(reproduction, build())
    rows = results(output)
    assert [list(row)[:5] for row in rows] == [["method", "epsilon", "seed", "metric", "value"]] * 6
    assert [(row["method"], row["seed"]) for row in rows] == [(job.method, job.seed) for job in reproduction.jobs()]
    assert rows == [fake_row(job) for job in reproduction.jobs()]
    # Seeds are test-only ones: nothing is promised.
    assert {key for row in rows for key, value in row.items() if value is None} == {"epsilon_spent"}
    assert {row["claim"] for row in rows} == {"none"}


def test_a_finished_sweep_runs_nothing_again_and_a_larger_one_only_what_is_new(output, build):
    quiet_sweep(build_reproduction(output), build("first"))
    again, larger = build("again"), build("larger")
    quiet_sweep(build_reproduction(output), again)
    assert again.runs() == []
    quiet_sweep(build_reproduction(output, seeds=3), larger)
    assert larger.runs() == ["fed_avg-2", "local_only-2", "mr_mtl-2"]
    assert len(results(output)) == 9


@pytest.mark.parametrize(
    "change", [{"scale_name": "small"}, {"data_digest": "other data"}], ids=["other settings", "other data"]
)
def test_rows_of_other_settings_or_data_are_not_taken_for_these(output, build, change):
    quiet_sweep(build_reproduction(output), build("first"))
    changed = build("changed")
    quiet_sweep(build_reproduction(output, **change), changed)
    assert len(changed.runs()) == 6
    # And those of before are still there for who goes back.
    back = build("back")
    quiet_sweep(build_reproduction(output), back)
    assert back.runs() == []


def test_a_failed_job_is_reported_keeps_the_others_and_is_run_again(output, build):
    reproduction = build_reproduction(output)
    _, failures = quiet_sweep(reproduction, build(fails=("fed_avg",)))
    assert [(job.method, reason) for job, reason in failures.items()] == [
        ("fed_avg", "ValueError: no luck with fed_avg")
    ] * 2
    assert "Traceback" in (output / FAILURES_FILE).read_text()
    assert {row["method"] for row in results(output)} == {"local_only", "mr_mtl"}
    mended = build("mended")
    _, failures = quiet_sweep(reproduction, mended)
    assert not failures
    assert mended.runs() == ["fed_avg-0", "fed_avg-1"]
    assert (output / FAILURES_FILE).read_text() == ""
    assert len(results(output)) == 6


def test_what_no_budget_allows_has_no_row_and_is_not_tried_again(output, build):
    reproduction = build_reproduction(output)
    store, failures = quiet_sweep(reproduction, build(infeasible=("fed_avg",)))
    assert not failures
    assert len(results(output)) == 4
    assert [one.infeasible for one in store.outcomes.values() if one.infeasible] == ["selection alone costs more"] * 2
    again = build("again")
    quiet_sweep(reproduction, again)
    assert again.runs() == []


def test_a_line_cut_off_by_a_power_cut_is_forgotten(output, build):
    reproduction = build_reproduction(output)
    quiet_sweep(reproduction, build())
    path = output / PARTIAL_FILE
    path.write_text(path.read_text()[:-20])
    assert len(ResultStore(reproduction).outcomes) == len(reproduction.jobs()) - 1
    rest = build("rest")
    quiet_sweep(reproduction, rest)
    assert len(rest.runs()) == 1
    assert len(results(output)) == 6
    assert len(ResultStore(reproduction).outcomes) == len(reproduction.jobs())


def test_the_grid_has_a_file_of_its_own(output, build):
    quiet_sweep(build_reproduction(output, lambdas=(0.1, 10.0), seeds=1), build())
    assert [row["method"] for row in results(output)] == ["local_only", "fed_avg", "mr_mtl"]
    assert [(row["method"], row["prox_weight"]) for row in results(output, "grid.json")] == [
        ("mr_mtl", 0.1),
        ("mr_mtl", 10.0),
    ]


def test_variants_have_files_of_their_own(output, build):
    quiet_sweep(build_reproduction(output, variant_names=("default", "silo_scaling"), seeds=1), build())
    assert len(results(output)) == len(results(output, "results_silo_scaling.json")) == 3
    quiet_sweep(build_reproduction(output, variant_names=("paper",), seeds=1), build())
    assert len(results(output, "results_paper.json")) == 3


def test_two_sweeps_do_not_write_to_one_folder(output, build):
    reproduction = build_reproduction(output)

    runner = build()
    output.mkdir()
    with only_writer(output), pytest.raises(DataError, match="writes to"):
        quiet_sweep(reproduction, runner)
    assert runner.runs() == []


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, id="terminated", marks=pytest.mark.all),
        pytest.param(signal.SIGKILL, id="killed"),
    ],
)
def test_a_stopped_sweep_leaves_no_process_and_the_next_one_goes_on(output, build, tmp_path, how):
    runner = build(slow=("mr_mtl",))
    process = start_sweep(tmp_path, output, runner)
    deadline = time.monotonic() + 60
    while len(runner.runs()) < 6 or len((output / PARTIAL_FILE).read_text().splitlines()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    _, printed = process.communicate(timeout=30)
    assert process.returncode != 0
    assert (b"KeyboardInterrupt" in printed) == (how == signal.SIGINT)
    while is_group_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_group_alive(process.pid)
    assert {row["method"] for row in results(output)} == {"local_only", "fed_avg"}
    rest = build("rest")
    quiet_sweep(build_reproduction(output), rest)
    assert rest.runs() == ["mr_mtl-0", "mr_mtl-1"]
    assert len(results(output)) == 6


@pytest.mark.hurt
@pytest.mark.timeout(3600)
def test_a_sweep_that_is_killed_again_and_again_ends_with_the_same_rows(output, build, tmp_path):
    runner = build(slow=("local_only", "fed_avg", "mr_mtl"), seconds=0.2)
    rng, kills, ended = random.Random(0), 0, None
    while ended != 0:
        process = start_sweep(tmp_path, output, runner, seeds=20)
        try:
            ended = process.wait(timeout=rng.uniform(0.5, 3))
        except subprocess.TimeoutExpired:
            process.kill()
            kills, ended = kills + 1, process.wait()
        process.stderr.close()
        while is_group_alive(process.pid):
            time.sleep(0.02)
        assert kills < 500
    assert kills > 5
    assert results(output) == [fake_row(job) for job in build_reproduction(output, seeds=20).jobs()]


def test_whoever_hands_out_the_jobs_imports_no_tensorflow():
    """Every worker process would import it a second time, before its own job asks for it."""
    program = "import sys, tff_pdp.reproduce.sweep; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
