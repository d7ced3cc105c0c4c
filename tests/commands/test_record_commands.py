"""`tff-pdp verify` and `tff-pdp seal` on the command line."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from serving.client_ids import ClientIdHash
from serving.saved_model import layout
from tests.training.record.runs import as_first_version, make_checkpoint, make_run, secrets_in
from tff_pdp.cli import main
from tff_pdp.digests import write_json
from tff_pdp.training.record.charges import run_id_of
from tff_pdp.training.record.releases import Release, all_releases, enter


@pytest.fixture
def output(tmp_path):
    """An experiment's folder with two runs, and one that was replaced; summary.json says what they spent."""
    enter(tmp_path, Release(None, "privacy is switched off", "local_only", 3, "0" * 32))
    for name in ("mr_mtl", "fed_avg"):
        make_run(tmp_path / name)
    write_summary(tmp_path)
    return tmp_path


def write_summary(output, change=lambda summary: None):
    """What `evaluate` writes of silos, as far as it is compared."""
    own = {release.run: release for release in all_releases(output) if release.ledger}
    silos = [
        {"id": silo, "epsilon_spent": own["mr_mtl"].ledger.epsilon(silo).best, "delta": 1e-4} for silo in ("a", "b")
    ]
    summary = {
        "algorithms": {name: {"run": run_id_of(output / name)} for name in own},
        "silos": silos,
        "privacy": {"composed": {"methods": 3, "epsilon": None}},
    }
    change(summary)
    (output / "summary.json").write_text(json.dumps(summary))


def verified(capsys, *places):
    """Exit status and findings by file."""
    status = main(["verify", *map(str, places), "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["holds"] == (status == 0)
    return status, [(one["path"], one["status"], one["text"]) for one in content["findings"]]


def test_a_line_for_each_thing_and_a_total(capsys, output):
    assert main(["verify", str(output)]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"ok", "absent"}
    named = [line.split(": ")[0].split()[1].removeprefix(f"{output}") for line in lines]
    assert [name for name in named if name.startswith("/mr_mtl")] == [
        "/mr_mtl/charges.jsonl",
        "/mr_mtl/checkpoints/round_000002",
        "/mr_mtl/checkpoints/round_000003",
        "/mr_mtl/config.json",
        "/mr_mtl/metrics.jsonl",
        "/mr_mtl/client_states",
        "/mr_mtl",
    ]
    assert "/earlier_releases.jsonl" in named
    assert total == f"{len(lines)} things checked: {len(lines) - 1} ok, 1 absent"
    (spent,) = [line for line in lines if "/mr_mtl: " in line]
    epsilon = next(release for release in all_releases(output) if release.run == "mr_mtl").ledger.epsilon("a").best
    assert f"epsilon {epsilon:.6g}, computed anew" in spent
    assert any(
        "everything on record in this folder together (runs and fits: 3): no bound, as a run on record (local_only)"
        in line
        for line in lines
    )


def test_one_run_alone(capsys, output):
    status, findings = verified(capsys, output / "mr_mtl")
    assert status == 0
    assert not [path for path, _, _ in findings if "fed_avg" in path or "summary" in path]


@pytest.mark.parametrize("is_one_run", [True, False])
def test_nothing_is_written_and_tensorflow_is_not_imported(output, is_one_run):
    place = output / "mr_mtl" if is_one_run else output

    def state():
        return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in output.rglob("*")}

    before = state()
    program = (
        f"import sys; from tff_pdp.cli import main; status = main(['verify', {str(place)!r}]);"
        "sys.exit(status or 3 * ('tensorflow' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert state() == before


def test_damage_of_any_file_is_named(capsys, output):
    """Of each file a byte in the middle; and each file away."""
    files = sorted(path for path in (output / "mr_mtl").rglob("*") if path.is_file() and path.stat().st_size)
    files += [output / name for name in ("earlier_releases.jsonl", "earlier_releases.head")]
    assert len(files) >= 13
    for path in files:
        stored = path.read_bytes()
        place = len(stored) // 2
        if path.suffix == ".sqlite":
            # Most of a page is empty.
            place = stored.index(b"<f4" if path.name == "store.sqlite" else np.float32(3).tobytes())
        for damaged in (stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1 :], b"", None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            status, findings = verified(capsys, output)
            problems = [text for _, status, text in findings if status == "problem"]
            what = (path, damaged and len(damaged))
            assert status == 1, what
            name = path.with_suffix("").name
            assert any(name in text for text in problems), (what, problems)
        path.write_bytes(stored)
    assert verified(capsys, output)[0] == 0


@pytest.mark.parametrize(
    ("name", "tail"), [("charges.jsonl", '{"kind": "reser'), ("metrics.jsonl", '{"round": 4, "sp')]
)
def test_a_torn_tail_is_told_from_damage(capsys, output, name, tail):
    path = output / "mr_mtl" / name
    stored = path.read_text()
    path.write_text(stored + tail)
    status, findings = verified(capsys, output)
    assert status == 0
    assert [(place, how) for place, how, _ in findings if how == "stopped"] == [(str(path), "stopped")]
    path.write_text(stored + tail + "\n")
    assert verified(capsys, output)[0] == (0 if name == "charges.jsonl" else 1)
    # Lines that are missing at the end.
    path.write_text("".join(stored.splitlines(keepends=True)[:-1]))
    status, findings = verified(capsys, output)
    assert status == 1
    assert any(name in text for _, how, text in findings if how == "problem")


def test_a_line_behind_its_head_counts(capsys, output):
    """As a kill between the line and the head leaves it."""
    head = output / "mr_mtl" / "charges.head"
    stored = head.read_text()
    lines = [json.loads(line) for line in (output / "mr_mtl" / "charges.jsonl").read_text().splitlines()]
    head.write_text(lines[-2]["chain"] + "\n")
    status, findings = verified(capsys, output)
    assert status == 0
    assert any("all of which count" in text for _, how, text in findings if how == "stopped")
    head.write_text(stored)


def understate(summary):
    summary["silos"][1]["epsilon_spent"] /= 2


def overstate(summary):
    summary["silos"][0]["epsilon_spent"] *= 1.01


def other_delta(summary):
    summary["silos"][0]["delta"] = 1e-6


def another_run(summary):
    summary["algorithms"]["mr_mtl"]["run"] = "1" * 32


def finite_together(summary):
    summary["privacy"]["composed"]["epsilon"] = 20.0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (understate, "states epsilon .* of b, but the ledger adds up to"),
        (overstate, "states epsilon .* of a, but the ledger adds up to"),
        (other_delta, "states delta 1e-06 of a"),
        (another_run, "is about a run of mr_mtl that is not on record"),
        (finite_together, r"states epsilon 20 of all runs, but a run on record \(local_only\)"),
    ],
)
def test_a_statement_that_the_ledgers_do_not_add_up_to_is_a_problem(capsys, output, change, sentence):
    write_summary(output, change)
    status, findings = verified(capsys, output)
    assert status == 1
    ((path, text),) = [(path, text) for path, how, text in findings if how == "problem"]
    assert path == str(output / "summary.json")
    assert re.search(sentence, text)


def test_runs_that_came_after_a_statement_make_it_too_small(capsys, tmp_path):
    make_run(tmp_path / "mr_mtl")
    (ledger,) = (release.ledger for release in all_releases(tmp_path))
    together = {"epsilon": ledger.epsilon("a").best, "delta": ledger.budgets["a"].delta}

    def finite(summary):
        summary["privacy"]["composed"] = {"methods": 1, **together}

    write_summary(tmp_path, finite)
    assert verified(capsys, tmp_path)[0] == 0
    make_run(tmp_path / "fed_avg")
    status, findings = verified(capsys, tmp_path)
    assert status == 1
    assert any("run `tff-pdp evaluate` again" in text for _, how, text in findings if how == "problem")


def test_runs_of_the_first_version_are_counted_and_named_old(capsys, output):
    before = [release.ledger and release.ledger.to_json() for release in all_releases(output)]
    for name in ("mr_mtl", "fed_avg"):
        as_first_version(output / name)
    write_summary(output)
    status, findings = verified(capsys, output)
    assert status == 0
    old = {path.removeprefix(f"{output}/mr_mtl/") for path, how, _ in findings if how == "old" and "mr_mtl" in path}
    checkpoints = {"checkpoints/round_000002", "checkpoints/round_000003"}
    assert old == {"charges.jsonl", "config.json", "metrics.jsonl", *checkpoints}
    assert sorted((release.ledger and release.ledger.to_json()) or "" for release in all_releases(output)) == (
        sorted(one or "" for one in before)
    )
    assert sum("computed anew" in text for _, _, text in findings) == 2


def test_a_folder_without_runs_is_refused(capsys, tmp_path):
    assert main(["verify", str(tmp_path)]) == 2
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert main(["seal", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_seal_seals_all_runs_and_they_verify(capsys, output):
    assert main(["seal", str(output)]) == 0
    text = capsys.readouterr().out
    assert text.count(": sealed; ") == 2
    assert "backups" in text
    assert secrets_in(output) == []
    status, findings = verified(capsys, output)
    assert status == 0
    assert sum("no key, no seed and no state" in text for _, _, text in findings) == 2
    assert main(["seal", str(output / "mr_mtl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sealed"][0]["num_files"] == 0


def test_nothing_is_sealed_where_one_run_is_not_done_or_not_used(capsys, output):
    make_run(output / "finetune", is_closed=False)
    assert main(["seal", str(output)]) == 2
    assert "finetune has not been run to its end" in capsys.readouterr().err
    assert len(secrets_in(output)) > 10
    make_run(output / "ditto")
    assert main(["seal", str(output / "ditto")]) == 2
    assert "has no results of" in capsys.readouterr().err
    assert main(["seal", str(output / "ditto"), "--discard-models"]) == 0
    assert main(["seal", str(output), "--unfinished"]) == 0
    assert secrets_in(output) == []
    capsys.readouterr()
    assert verified(capsys, output)[0] == 0


def test_a_key_that_came_back_to_a_sealed_run_is_a_problem(capsys, output):
    assert main(["seal", str(output)]) == 0
    (output / "mr_mtl" / "checkpoints" / "round_000003" / "run_key.json").write_text("{}")
    capsys.readouterr()
    status, findings = verified(capsys, output)
    assert status == 1
    assert any("run_key.json is still there" in text for _, how, text in findings if how == "problem")


def publish(output, run_id, epsilons, *, is_hashed=True, name="mr_mtl"):
    """An export as far as it is checked."""
    version = output / "export" / "digits" / "1"
    (version / "assets.extra").mkdir(parents=True)
    shown, card = str, {"algorithm": name, "run": run_id, "client_id_kind": "plain"}
    if is_hashed:
        shown = ClientIdHash.load_or_create(output / "client_id.key")
        card |= {"client_id_kind": "hashed", "client_id_key": shown.fingerprint}
    report = {"unit": "silo_example", "silos": [{"id": shown(one), "epsilon": e} for one, e in epsilons.items()]}
    layout.write_json(version / layout.MODEL_CARD_FILE, card)
    layout.write_json(version / layout.PRIVACY_REPORT_FILE, report)
    layout.write_manifest(version, {})
    return version


@pytest.mark.parametrize("ids", ["plain", "hashed", "without the key"])
@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_an_export_that_states_less_than_its_run_spent_is_a_problem(capsys, output, ids, factor):
    run = next(release for release in all_releases(output) if release.run == "mr_mtl")
    epsilons = {scope: factor * run.ledger.epsilon(scope).best for scope in "ab"}
    version = publish(output, run.run_id, epsilons, is_hashed=ids != "plain")
    if ids == "without the key":
        (output / "client_id.key").unlink()
    status, findings = verified(capsys, output)
    assert status == (0 if factor == 1 else 1)
    (found,) = [(how, text) for path, how, text in findings if path == str(version)]
    assert found[0] == ("ok" if factor == 1 else "problem")
    assert ("but the ledger adds up to" in found[1]) == (factor < 1)


def test_a_lost_or_another_key_of_ids_and_lost_statistics_are_problems(capsys, output):
    publish(output, run_id_of(output / "mr_mtl"), {"a": None, "b": None})
    assert verified(capsys, output)[0] == 0
    key = output / "client_id.key"
    stored = key.read_text()
    for changed in ("0" * 64, "", stored[:40]):
        key.write_text(changed)
        status, findings = verified(capsys, output)
        assert (status, [path for path, how, _ in findings if how == "problem"]) == (1, [str(key)])
    key.write_text(stored)
    statistics = output / "silo_releases.json"
    write_json(statistics, {"format_version": 1, "made_with": {}, "silos": {"a": {}}})
    assert verified(capsys, output)[0] == 0
    statistics.unlink()
    assert verified(capsys, output)[0] == 0, "no run says that there were any"
    settings = {"format_version": 1, "privacy": {"num_examples": {"kind": "noised", "epsilon": 0.5}}}
    make_run(output / "ditto")
    write_json(output / "ditto" / "config.json", settings)
    for number in (2, 3):
        make_checkpoint(output / "ditto", number)
    status, findings = verified(capsys, output)
    assert (status, [path for path, how, _ in findings if how == "problem"]) == (1, [str(statistics)])


def test_a_changed_file_of_an_export_is_a_problem(capsys, output):
    version = publish(output, run_id_of(output / "mr_mtl"), {"a": None, "b": None})
    assert verified(capsys, output)[0] == 0
    path = version / layout.MODEL_CARD_FILE
    path.write_text(path.read_text().replace("mr_mtl", "fed_avg"))
    status, findings = verified(capsys, output)
    assert status == 1
    assert any("SHA-256" in text for _, how, text in findings if how == "problem")


def test_the_exported_method_is_sealed_once_this_run_was_exported(capsys, output):
    folder = output / "mr_mtl"
    settings = json.loads((folder / "config.json").read_text())
    settings = {**settings, "export": {"algorithm": "mr_mtl"}}
    del settings["digest"]
    # Of a run that was started with these settings.
    for path in [folder / "config.json", *(folder / "checkpoints").rglob("checkpoint.json")]:
        path.unlink()
    write_json(folder / "config.json", settings)
    for number in (2, 3):
        make_checkpoint(folder, number)
    assert main(["seal", str(folder)]) == 2
    assert "has no export of" in capsys.readouterr().err
    version = publish(output, "1" * 32, {})
    assert main(["seal", str(folder)]) == 2, "another run of the method was exported"
    shutil.rmtree(version.parent)
    publish(output, run_id_of(folder), {})
    assert main(["seal", str(folder)]) == 0
