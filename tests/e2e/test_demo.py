"""The whole house on a small scale: raw data to served predictions, through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import amount
from tff_pdp.commands.demo import run_demo
from tff_pdp.errors import ConfigError, UserError


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "run"
    # What is faster is found out by tracing each method in both forms, which takes most of the time.
    chosen = amount(test={"training.client_parallelism": "loop"}, all={})
    summary, text = run_demo(output, None, chosen)
    return output, summary, text


@pytest.mark.timeout(300)
def test_summary_has_what_readers_rely_on(demo):
    output, summary, _ = demo
    assert json.loads((output / "summary.json").read_text()) == summary
    assert set(summary["algorithms"]) == {"local_only", "fed_avg", "mr_mtl"}
    for row in summary["algorithms"].values():
        assert 0 <= row["worst_decile"] <= row["mean"] <= 1
        assert 0 <= row["mean_over_examples"] <= 1
    assert len(summary["silos"]) == 10
    assert all(silo["epsilon_spent"] <= silo["epsilon_target"] <= 8 for silo in summary["silos"])
    assert len({silo["epsilon_target"] for silo in summary["silos"]}) > 1
    assert (summary["metric"], summary["higher_is_better"]) == ("accuracy", True)
    assert max(row["mean"] for row in summary["algorithms"].values()) >= 0.65
    assert summary["served_equals_in_process"] is True


def test_outputs_are_where_the_text_says(demo):
    output, _, text = demo
    assert (output / "report.html").stat().st_size > 10_000
    versions = list((output / "export" / "digits").glob("[0-9]*"))
    assert len(versions) == 1
    assert str(versions[0]) in text
    report = json.loads((versions[0] / "assets.extra" / "privacy_report.json").read_text())
    assert report["claim"] == "formal-conditional"
    assert len(report["silos"]) == 10


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="no demo wrote"):
        run_demo(tmp_path, None)
    assert (tmp_path / "thesis.txt").exists()


def test_the_users_data_is_looked_at_before_anything_is_replaced(tmp_path):
    output = tmp_path / "run"
    (output / "leaf").mkdir(parents=True)
    (output / ".tff_pdp_demo").touch()
    (output / "leaf" / "all_data_0.json").write_text("{}")
    for data in (output / "leaf", tmp_path / "absent"):
        with pytest.raises(UserError):
            run_demo(output, str(data))
    assert (output / "leaf" / "all_data_0.json").exists()


@pytest.mark.timeout(300)
@pytest.mark.skipif("TFF_PDP_DATA" not in os.environ, reason="TFF_PDP_DATA names no folder of real data")
def test_real_writers_through_the_command_line(tmp_path):
    data = Path(os.environ["TFF_PDP_DATA"]) / "femnist_digits_leaf" / "all_data"
    output = str(tmp_path / "run")
    command = [sys.executable, "-m", "tff_pdp.cli", "demo", "--data", str(data), "--output", output, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["silos"]) == 24
    assert summary["served_equals_in_process"] is True
