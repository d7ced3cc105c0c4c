"""Damaged runs, by the commands that go on with them: one line that names the file, or what an undamaged run gives."""

import contextlib
import dataclasses
import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel
from tests.tiers import amount
from tests.training.record.damages import Damage
from tests.training.record.whole_runs import (
    NUM_TRAIN,
    USERS,
    WholeRun,
    config_of,
    files_of,
    points,
    read_newest,
    read_run,
)
from tff_pdp import cli
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.training import train as training

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_fresh_process")]


@dataclasses.dataclass(frozen=True)
class Case:
    """A command that goes on with a run.

    Attributes:
      run: the run's name.
      arguments: of the command; `ADDED` and `ADDRESS` stand for what the test made.
      files: words of which one is in the names of files that the command may read.
      result: what the command gave, from the run and its printed JSON.
    """

    run: str
    arguments: tuple[str, ...]
    files: tuple[str, ...]
    result: Callable[[WholeRun, Any], Any]


def recorded(_: WholeRun, printed: Any) -> Any:
    """What personalising cost; the fit itself draws anew each time."""
    return [(one["served_as"], one["epsilon"], one["recorded"]) for one in printed["clients"]]


TRAINED = (
    "clients/",
    "registry/",
    "/charges",
    "checkpoints/",
    "earlier_releases",
    "config.json",
    "metrics.jsonl",
    "parallelism",
)
FIT = ("--examples", "ADDED", "--client-id", "newer", "--steps", "3", "--learning-rate", "0.5", "--epsilon", "4")
CASES: Mapping[str, Case] = {
    "train": Case(
        "halfway", ("train", "--resume"), (*TRAINED, "client_states"), lambda run, _: [read_run(run), files_of(run)]
    ),
    "evaluate": Case("silos", ("evaluate",), TRAINED, lambda _, printed: printed),
    "export": Case(
        "silos", ("export", "--drop-added"), (*TRAINED, "digits", "client_id"), lambda run, _: read_newest(run)
    ),
    "tune": Case("stopped", ("tune", "--resume"), (*TRAINED, "search/"), lambda _, printed: printed["selected"]),
    "tuned": Case(
        "tuned", ("tune", "--resume"), (*TRAINED, "selected", "releases"), lambda _, printed: {**printed, "folder": ""}
    ),
    "personalize": Case(
        "silos",
        ("personalize", *FIT, "--delta", "1e-3"),
        ("digits", "client_id", "earlier", "/charges", "registry/"),
        recorded,
    ),
    "predict": Case(
        "silos",
        ("predict", "--client-id", "east", "--address", "ADDRESS"),
        ("clients/", "client_id"),
        lambda _, printed: printed,
    ),
}


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A training of users that was stopped between two checkpoints."""
    config = config_of(tmp_path_factory.mktemp("halfway"), USERS, "fed_per")
    prepare_clients(config)

    def run_round(method, state, round_number, data):
        if round_number == 4:
            raise KeyboardInterrupt
        return real_run_round(method, state, round_number, data)

    real_run_round = training.run_round
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(training, "run_round", run_round)
        training.train(config, "fed_per", progress=False)
    return WholeRun("halfway", config, "fed_per")


@pytest.fixture(scope="module")
def words(whole_runs, tmp_path_factory):
    """What words in arguments stand for: a file of a new client's examples, and the address of a server."""
    added = tmp_path_factory.mktemp("added") / "added.npz"
    own = points("newer", 11)
    np.savez(added, x=own.x[:NUM_TRAIN].astype(np.float32), y=np.asarray(own.y[:NUM_TRAIN]) > 0)
    with EmbeddedServer([ServedModel("digits", whole_runs["silos"].config.export_folder)]) as server:
        yield {"ADDED": str(added), "ADDRESS": f"127.0.0.1:{server.rest_port}"}


@pytest.fixture(scope="module")
def runs(whole_runs, halfway):
    """All runs by name."""
    return {**whole_runs, "halfway": halfway}


@pytest.fixture(scope="module")
def expected(runs, words, tmp_path_factory):
    """A function: what a command gives on the undamaged run."""
    known = {}

    def look_up(name):
        if name not in known:
            run = runs[CASES[name].run].copied_to(tmp_path_factory.mktemp("whole") / "run")
            status, printed, error = run_command(name, run, words)
            assert status == 0, error
            known[name] = CASES[name].result(run, printed)
        return known[name]

    return look_up


def command_of(name: str, run: WholeRun, words: Mapping[str, str]) -> list[str]:
    """The command line, for a configuration beside the run."""
    command, *others = CASES[name].arguments
    path = run.output.with_name("experiment.json")
    # YAML has JSON in it.
    path.write_text(json.dumps(run.config.to_dict()))
    return [command, "--config", str(path), "--json", *(words.get(one, one) for one in others)]


def run_command(name: str, run: WholeRun, words: Mapping[str, str]) -> tuple[int, Any, str]:
    """Runs a command in this process: its exit status, what it printed, and what it said."""
    out, error = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as state, pytest.MonkeyPatch.context() as patch:
        # One registry would count the same new client's fits in all copies of a run, and each would cost more.
        patch.setenv("XDG_STATE_HOME", state)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = cli.main(command_of(name, run, words))
    return status, json.loads(out.getvalue()) if status == 0 else None, error.getvalue()


def damaged(run: WholeRun, case: Case, seed: str, output: Path) -> tuple[WholeRun, str, Damage]:
    """A damaged copy of a run, the file, and what was done to the file."""
    names = [name for name in files_of(run) if any(word in name for word in case.files) and ".lock" not in name]
    name = random.Random(seed).choice(names)
    damage = Damage.draw(run.output / name, seed)
    copy = run.copied_to(output)
    damage.inflict(copy.output / name)
    return copy, name, damage


def assert_one_line(name: str, said: str, file: str) -> None:
    """The command says in one line which file is the matter."""
    (line,) = [line for line in said.replace("\r", "\n").split("\n") if line.startswith(f"tff-pdp {name}: ")]
    assert file.rpartition("/")[2] in line, line
    assert said.endswith(f"{line}\n")
    assert "Traceback" not in said


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_run_is_refused_in_one_line_or_gives_the_same(runs, words, expected, tmp_path, name):
    case = CASES[name]
    refused = 0
    times = amount(test=1, all=8)
    for number in range(times):
        run, file, damage = damaged(runs[case.run], case, f"{name} {number}", tmp_path / "damaged")
        status, printed, said = run_command(name, run, words)
        about = f"{file}, {damage.about}: {status}, {said}"
        assert status in (0, 2), about
        if status:
            assert_one_line(case.arguments[0], said, file)
            refused += 1
        else:
            assert case.result(run, printed) == expected(name), about
        shutil.rmtree(run.output)
    print(f"{name}: {refused} of {times} refused")


@pytest.mark.all
@pytest.mark.parametrize("name", ["train", "evaluate", "tuned"])
def test_a_command_of_its_own_process_says_one_line_and_no_traceback(runs, words, tmp_path, name):
    run = runs[CASES[name].run].copied_to(tmp_path / "damaged")
    (path,) = run.output.glob("*/config.json")
    path.write_bytes(path.read_bytes().replace(b'"inprocess"', b'"inprocesr"'))
    command = [sys.executable, "-m", "tff_pdp.cli", *command_of(name, run, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(CASES[name].arguments[0], done.stderr, path.name)
