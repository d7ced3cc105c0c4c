"""`tff-pdp status`, `compare` and `list`, on runs as training leaves them."""

import json
import os
import shlex
import signal
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.training.record.runs import ledger_after, make_checkpoint, make_run
from tests.unrun import parse
from tff_pdp.cli import COMMANDS, main
from tff_pdp.digests import as_line
from tff_pdp.lock import lock_path, only_writer
from tff_pdp.training.record.charges import ChargesWriter, read_charges, run_id_of
from tff_pdp.training.run_folder import METRICS_FILE

_HOLD = """
import sys, time
from pathlib import Path
from tff_pdp.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def status(capsys, *words):
    """The content of `tff-pdp status --json`, a run each."""
    assert main(["status", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def unfinished(folder):
    """A run that reserved three rounds, of which two have a checkpoint."""
    make_run(folder, is_closed=False)
    for file in (folder / "checkpoints" / "round_000003").iterdir():
        file.unlink()
    (folder / "checkpoints" / "round_000003").rmdir()
    rows = [{"format_version": 1, "round": number, "mean": 0.5, "seconds": 0.5} for number in (1, 2)]
    (folder / METRICS_FILE).write_text("".join(as_line(row) for row in rows))
    make_checkpoint(folder, 2)


def assert_spending_is_the_ledgers(found, folder):
    ledger = read_charges(folder).ledger
    assert {one["scope"] for one in found["spent"]} == set(ledger.budgets)
    for one in found["spent"]:
        spent = ledger.epsilon(one["scope"]).best
        assert abs(one["epsilon_spent"] - spent) < 1e-9
        assert abs(one["epsilon_left"] - (8.0 - spent)) < 1e-9
        assert (one["budget"], one["delta"]) == (8.0, 1e-4)


def test_a_running_run(capsys, tmp_path):
    folder = tmp_path / "mr_mtl"
    unfinished(folder)
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        (found,) = status(capsys, folder)
        process.kill()
    assert (found["state"], found["process"]) == ("running", process.pid)
    assert (found["round_number"], found["rounds"], found["rounds_kept"], found["rounds_charged"]) == (2, 3, 2, 3)
    # Half a second for the one round that is left.
    assert (found["seconds_per_round"], found["seconds_left"]) == (0.5, 0.5)
    assert_spending_is_the_ledgers(found, folder)
    # Three rounds are reserved, though two are known to be done.
    assert found["spent"][0]["epsilon_spent"] == ledger_after(3).epsilon("a").best


def test_the_pace_of_the_running_process_counts_all_that_it_does(capsys, tmp_path):
    folder = tmp_path / "mr_mtl"
    make_run(folder, is_closed=False)
    with only_writer(folder):
        started = lock_path(folder).stat().st_mtime
        for number, seconds in ((2, 10.0), (3, 14.0)):
            os.utime(folder / "checkpoints" / f"round_{number:06d}", (started + seconds, started + seconds))
        (found,) = status(capsys, folder)
    assert found["seconds_per_round"] == pytest.approx(4.0)


@pytest.mark.parametrize(("is_killed", "expected"), [(False, "stopped"), (True, "killed")])
def test_a_stopped_run_and_a_killed_run(capsys, tmp_path, is_killed, expected):
    folder = tmp_path / "mr_mtl"
    unfinished(folder)
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGKILL if is_killed else signal.SIGINT)
    (found,) = status(capsys, tmp_path)
    assert (found["state"], found["process"], found["seconds_left"]) == (expected, None, None)
    assert_spending_is_the_ledgers(found, folder)
    assert main(["status", str(folder)]) == 0
    first, second, *scopes = capsys.readouterr().out.splitlines()
    assert first == (
        f"{folder}: {expected}, round 2 of 3, 2 rounds are kept, which the command with --resume goes on from, "
        "0.5 s a round"
    )
    assert second.startswith("  epsilon spent through round 3: ") and second.endswith(" (scopes: 2)")
    assert [line.split()[0] for line in scopes] == ["a", "b"] and all(" of 8, left " in line for line in scopes)


def test_finished_and_sealed_runs_and_runs_without_privacy(capsys, tmp_path):
    make_run(tmp_path / "finished")
    make_run(tmp_path / "sealed")
    with ChargesWriter(tmp_path / "sealed") as writer:
        writer.seal_run()
    make_run(tmp_path / "seeded", non_private="the noise follows from training.test_only_seed")
    by_name = {one["folder"].rpartition("/")[2]: one for one in status(capsys, tmp_path)}
    finished, sealed, seeded = (by_name[name] for name in ("finished", "sealed", "seeded"))
    assert [one["state"] for one in (finished, sealed, seeded)] == ["finished", "sealed", "finished"]
    assert_spending_is_the_ledgers(sealed, tmp_path / "sealed")
    assert (seeded["spent"], seeded["no_epsilon"]) == ([], "the noise follows from training.test_only_seed")


def test_methods_that_have_not_begun_are_listed_by_their_experiment(capsys, tmp_path):
    assert main(["status", "--config", "demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [one["folder"].rpartition("/")[2] for one in found] == ["local_only", "fed_avg", "mr_mtl"]
    assert main(["status"]) == 2
    assert "name a run" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_nothing_is_written_and_tensorflow_is_not_imported(tmp_path):
    make_run(tmp_path / "mr_mtl")

    def state():
        return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*")}

    before = state()
    program = (
        f"import sys; from tff_pdp.cli import main; main(['status', {str(tmp_path)!r}]); "
        f"main(['compare', {str(tmp_path)!r}]); main(['list', 'algorithms']); sys.exit('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert state() == before


@pytest.fixture
def two_runs(tmp_path):
    """Two experiments with a method each; one was tested, and one only validated."""
    for name, means in (("small", (0.5, 0.625, 0.75)), ("large", (0.25, 0.5, 0.375))):
        folder = tmp_path / name / "mr_mtl"
        make_run(folder)
        rows = [
            {"format_version": 1, "round": number, "metric": "accuracy", "nonprivate": {"mean": mean}, "seconds": 0.5}
            for number, mean in enumerate(means, 1)
        ]
        (folder / METRICS_FILE).write_text("".join(as_line(row) for row in rows))
        for number in (2, 3):
            make_checkpoint(folder, number)
    row = {"mean": 0.8125, "worst_decile": 0.5, "spread": 0.125, "shared_mean": None}
    row["run"] = run_id_of(tmp_path / "small" / "mr_mtl")
    (tmp_path / "small" / "summary.json").write_text(json.dumps({"metric": "accuracy", "algorithms": {"mr_mtl": row}}))
    return tmp_path


def test_a_table_of_runs_side_by_side(capsys, two_runs):
    assert main(["compare", str(two_runs / "small"), str(two_runs / "large" / "mr_mtl")]) == 0
    title, head, small, large, *notes = capsys.readouterr().out.splitlines()
    assert title == "accuracy; not private"
    assert head.split()[0] == "run" and head.split()[-2:] == ["rounds", "epsilon"]
    spent = f"{ledger_after(3).epsilon('a').best:.2g}"[:3]
    assert small.split()[:-1] == ["small/mr_mtl", "0.812", "0.5", "0.125", "–", "0.75", "3"]
    assert small.split()[-1].startswith(spent)
    assert large.split()[:-1] == ["large/mr_mtl", "–", "–", "–", "–", "0.375", "3"]
    assert "not tested, so only validated: large/mr_mtl" in notes[0]


def test_results_of_a_run_that_was_replaced_are_not_shown(capsys, two_runs):
    path = two_runs / "small" / "summary.json"
    path.write_text(path.read_text().replace(run_id_of(two_runs / "small" / "mr_mtl"), "f" * 32))
    assert main(["compare", str(two_runs / "small"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["tested"] == {} and row["history"] == [[1, 0.5], [2, 0.625], [3, 0.75]]


def test_curves_as_a_page_and_as_a_figure(capsys, two_runs):
    places = [str(two_runs / "small"), str(two_runs / "large")]
    svg, page = two_runs / "curves.svg", two_runs / "curves.html"
    for plot in (svg, page):
        assert main(["compare", *places, "--plot", str(plot)]) == 0
        assert f"plot: {plot}" in capsys.readouterr().out
    assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    text = page.read_text()
    HTMLParser().feed(text)
    assert text.count("<tr>") == 3 and "small/mr_mtl" in text and "<svg role" in text
    assert main(["compare", *places, "--plot", "curves.png"]) == 2
    assert "must end in .html or .svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("algorithms", "mr_mtl", "pulled to the mean"),
        ("models", "mlp", "dense layers"),
        ("sources", "leaf", "LEAF"),
        ("plans", "user", "as a whole"),
        ("trackers", "tensorboard", "event files"),
    ],
)
def test_lists_have_one_line_for_each_kind(capsys, kind, name, words):
    from tff_pdp.experiment import kinds

    known = {"sources": kinds.SOURCES, "plans": kinds.PLANS, "models": kinds.MODELS, "trackers": kinds.TRACKERS}
    own = known.get(kind, kinds.ALGORITHMS).own
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = dict(line.split(maxsplit=1) for line in lines)
    assert found.keys() == own.keys()
    assert words in found[name]
    assert all(20 < len(text) < 120 for text in found.values()), found


def test_an_unknown_list_names_the_known_ones(capsys):
    assert main(["list", "optimizers"]) == 2
    assert "algorithms" in capsys.readouterr().err


def test_the_command_that_goes_on_has_the_given_options_and_resumes():
    """Parsed again, it is the same command, but for `--overwrite`."""
    words = ["--config", "my file.yaml", "--set", "training.rounds=10", "--device", "cpu", "--log-file", "a.log"]
    train = parse(COMMANDS, ["train", *words, "--quiet", "--overwrite"])
    assert train.going_on("train", ["--algorithm", "mr_mtl"]) == (
        "tff-pdp train --config 'my file.yaml' --algorithm mr_mtl --set training.rounds=10 --device cpu --quiet "
        "--log-file a.log --resume"
    )
    tune = parse(COMMANDS, ["tune", "--config", "a.yaml", "--values", "prox_weight=0.1,1", "--mean-runs", "3.5"])
    again = parse(COMMANDS, shlex.split(tune.going_on("tune", tune._words()))[1:])
    assert (again.values, again.mean_runs, again.resume) == (tune.values, 3.5, True)
