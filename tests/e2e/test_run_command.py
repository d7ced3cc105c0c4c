"""`tff-pdp run`: from raw data to an export that answers, stopped on the way and continued by the same command."""

import json
import shlex
import urllib.request
from pathlib import Path

import pytest
import yaml

from beam_pipelines.sources.partition import write_digits_leaf
from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel
from tests.places import DEMO
from tff_pdp.cli import main
from tff_pdp.training import train as training


@pytest.fixture
def config(tmp_path):
    """The file of a small experiment with one method."""
    write_digits_leaf(tmp_path / "leaf", num_clients=3, concentration=1.0, seed=0)
    content = yaml.safe_load(DEMO.read_text())
    content |= {"output": str(tmp_path / "run"), "algorithms": {"mr_mtl": content["algorithms"]["mr_mtl"]}}
    content["data"]["input"] = str(tmp_path / "leaf")
    content["training"] |= {
        "rounds": 4,
        "checkpoint_every": 1,
        "evaluate_every": 2,
        "client_parallelism": "loop",
        "trackers": [{"kind": "tensorboard"}],
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.timeout(300)
def test_one_command_does_all_goes_on_after_a_stop_and_repeats_nothing(config, monkeypatch, capsys, one_fresh_process):
    output = config.parent / "run"

    def stop(method, state, number, data, real=training.run_round):
        if number == 3:
            raise KeyboardInterrupt
        return real(method, state, number, data)

    with monkeypatch.context() as patch:
        patch.setattr(training, "run_round", stop)
        assert main(["run", "--config", str(config), "--quiet"]) == 130
    *_, text = capsys.readouterr().err.splitlines()
    stopped, command = text.split(": to go on: ")
    assert stopped == "tff-pdp run: stopped: mr_mtl: in round 3 of 4; 2 rounds are kept"
    assert main(["status", str(output), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert (found["state"], found["round_number"], found["rounds"]) == ("stopped", 2, 4)

    program, *words = shlex.split(command)
    assert (program, main([*words, "--json"])) == ("tff-pdp", 0)
    content = json.loads(capsys.readouterr().out)
    assert content["trained"] == ["mr_mtl"]
    assert content["summary"]["algorithms"]["mr_mtl"]["rounds"] == 4
    assert (output / "report.html").stat().st_size > 10_000
    assert len(list((output / "tensorboard" / "mr_mtl").glob("events.*"))) == 2
    _check_that_the_request_is_answered(output, content["export"]["example_request"])

    before = files_of(output)
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "mr_mtl: finished already" in captured.err and "exported already: " in captured.out
    changed = {path for path, time in files_of(output).items() if before.get(path) != time}
    assert all(path.suffix == ".lock" for path in changed), changed


def _check_that_the_request_is_answered(output, command):
    """Sends the request that the export names, as the command would, and finds a personal model's answer."""
    curl, option, body, url = shlex.split(command)
    assert (curl, option, body[0]) == ("curl", "-d", "@")
    with EmbeddedServer([ServedModel("digits", output / "export" / "digits")]) as server:
        address = url.replace("localhost:8501", f"127.0.0.1:{server.rest_port}")
        with urllib.request.urlopen(address, Path(body[1:]).read_bytes(), timeout=30) as answer:
            outputs = json.loads(answer.read())["outputs"]
    assert outputs["personalized"] == [True]
    assert sum(outputs["probabilities"][0]) == pytest.approx(1.0, abs=1e-5)
