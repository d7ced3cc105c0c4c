import json

import pytest

from tests.reproduce.reproduce_support import BuildFakeRunner
from tff_pdp import cli
from tff_pdp.reproduce import reproduction


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `tff-pdp reproduce school` on made-up values."""
    (tmp_path / "data" / "school").mkdir(parents=True)
    (tmp_path / "data" / "school" / "school.mat").write_bytes(b"cells")
    (tmp_path / "ran").mkdir()

    def run(*words, **how):
        runner = BuildFakeRunner(tmp_path / "ran", **how)
        monkeypatch.setattr(reproduction, "build_job_runner", runner)
        where = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "out"), "--jobs", "2"]
        return cli.main(["reproduce", "school", *where, *words])

    return run


def test_the_command_writes_rows_table_and_figures(command, tmp_path, capfd):
    words = ("--methods", "local_only", "fed_avg", "mr_mtl", "--epsilons", "6", "--seeds", "2", "--grid", "0.1", "1")
    assert command("--paper", *words) == 0
    captured = capfd.readouterr()
    assert "| 6 | MR-MTL" in captured.out
    assert "20/20" in captured.err
    out = tmp_path / "out"
    assert len(json.loads((out / "results_paper.json").read_text())) == 6
    assert len(json.loads((out / "results_paper_common_scaling.json").read_text())) == 6
    assert len(json.loads((out / "grid_paper.json").read_text())) == 4
    assert (out / "table_paper.md").read_text() in captured.out
    assert (out / "figures" / "lambda_paper.svg").exists()
    assert (out / "figures" / "privacy_utility_paper_common_scaling.png").exists()
    assert not (out / "results.json").exists()


def test_json_is_one_object_and_a_failure_is_status_one(command, capfd):
    words = ("--methods", "local_only,ditto", "--epsilons", "6", "--seeds", "1", "--variants", "default", "--json")
    assert command(*words, fails=("ditto",)) == 1
    content = json.loads(capfd.readouterr().out)
    assert content["failures"] == {"ditto (default), epsilon 6, seed 0": "ValueError: no luck with ditto"}
    (mean,) = content["variants"]["default"]["means"]
    assert mean["method"] == "local_only"
    assert command(*words) == 0
    assert json.loads(capfd.readouterr().out)["failures"] == {}


def test_no_job_at_a_time_is_refused(command, capfd):
    assert command("--jobs", "0") == 2
    assert "--jobs 0" in capfd.readouterr().err
