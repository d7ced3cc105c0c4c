"""A sealed run has no key and no states, and all of its record; a kill at any point is mended by sealing again."""

import json
import subprocess
import sys

import pytest

from tests.tiers import amount
from tests.training.record.runs import KEY, ROUNDS, as_first_version, make_checkpoint, make_run, secrets_in, spent
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.files import overwrite_and_remove
from tff_pdp.lock import only_writer
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import CHARGES_FILE, ChargesWriter, read_charges
from tff_pdp.training.record.releases import (
    CHECKPOINTS,
    KNOWN_SEED,
    SEARCH,
    all_releases,
    set_aside,
    why_without_bound,
)
from tff_pdp.training.record.sealing import seal_run, unsealed_files

KEPT = {
    "charges.head",
    "charges.jsonl",
    "checkpoints/round_000003/checkpoint.json",
    "config.json",
    "metrics.jsonl",
}


def files_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_key_seeds_and_states_are_gone_and_the_record_stays(tmp_path):
    folder = tmp_path / "mr_mtl"
    identity = make_run(folder)
    before = spent(tmp_path)
    # What killed commands leave.
    for place in (folder / "checkpoints" / ".round_000004.tmp", tmp_path / ".mr_mtl.removed" / "checkpoints"):
        place.mkdir(parents=True)
        (place / "run_key.json").write_text(KEY.secret.hex())
    assert len(secrets_in(tmp_path)) > 5
    sealed = seal_run(folder, ROUNDS)
    assert sealed.num_files > 8
    assert secrets_in(tmp_path) == []
    assert files_of(tmp_path) - {".mr_mtl.lock"} == {f"mr_mtl/{name}" for name in KEPT}
    assert spent(tmp_path) == before
    charges = read_charges(folder)
    assert (charges.run_id, charges.is_sealed, charges.is_closed) == (identity.run_id, True, True)
    assert checkpoint_files.newest(folder / CHECKPOINTS).run_key is None
    assert seal_run(folder, ROUNDS).num_files == 0


@pytest.mark.parametrize(
    "place", ["checkpoints", "client_states", "checkpoints/round_000003", "checkpoints/round_000003/run_key.json"]
)
def test_a_link_to_what_would_stay_is_refused(tmp_path, place):
    folder = tmp_path / "mr_mtl"
    make_run(folder)
    path = folder / place
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{path.name} is a link: to keep the file or folder that the link leads to"):
        seal_run(folder, ROUNDS)
    assert not read_charges(folder).is_sealed
    assert path in list(unsealed_files(folder))
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    seal_run(folder, ROUNDS)
    assert secrets_in(tmp_path) == []


def test_nothing_of_another_run_is_destroyed_through_a_link(tmp_path):
    """Such as one that `--overwrite` of an earlier version has left, in place of a run's folder or beside it."""
    folder, other = tmp_path / "mr_mtl", tmp_path / "other" / "mr_mtl"
    make_run(folder)
    make_run(other)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    left = tmp_path / ".mr_mtl.removed"
    left.symlink_to(other)
    with pytest.raises(ConfigError, match=r"\.mr_mtl\.removed is a link: .* to the place of the link$"):
        seal_run(folder, ROUNDS)
    assert not read_charges(folder).is_sealed
    left.unlink()
    link = tmp_path / "link"
    link.symlink_to(other)
    with pytest.raises(ConfigError, match=f"^{link} is a link, .*: seal {other}, which it leads to, or move that"):
        seal_run(link, ROUNDS)
    # The record of the other run, which would say that it is sealed.
    charges = folder / CHARGES_FILE
    charges.rename(tmp_path / "kept")
    charges.symlink_to(other / CHARGES_FILE)
    with pytest.raises(ConfigError, match=f"^{charges} is a link: "):
        seal_run(folder, ROUNDS)
    charges.unlink()
    (tmp_path / "kept").rename(charges)
    with pytest.raises(OSError, match="symbolic links"):
        overwrite_and_remove(link)
    seal_run(folder, ROUNDS)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


def test_a_sealed_run_is_neither_loaded_nor_charged_but_can_be_replaced(tmp_path):
    folder = tmp_path / "mr_mtl"
    make_run(folder)
    before = spent(tmp_path)
    seal_run(folder, ROUNDS)
    with pytest.raises(ConfigError, match=f"{folder} was sealed: .* cannot be trained, tested or exported"):
        checkpoints.load_latest(folder / CHECKPOINTS)
    with ChargesWriter(folder) as writer, pytest.raises(ConfigError, match="was sealed"):
        writer.reserve(4, None, {})
    set_aside(tmp_path, folder)
    assert not folder.exists()
    assert spent(tmp_path) == before


def test_what_is_on_record_refuses_a_sealed_run_before_its_checkpoint_does(tmp_path, monkeypatch):
    """As a kill between the two leaves it."""
    folder = tmp_path / "mr_mtl"
    make_run(folder)
    with ChargesWriter(folder) as writer:
        writer.seal_run()
    with pytest.raises(ConfigError, match="was sealed"):
        checkpoints.load_latest(folder / CHECKPOINTS)
    assert list(unsealed_files(folder))
    seal_run(folder, ROUNDS)
    assert not list(unsealed_files(folder))


def test_a_run_that_is_not_done_is_sealed_only_where_asked(tmp_path):
    folder = tmp_path / "mr_mtl"
    make_run(folder, is_closed=False)
    before, files = spent(tmp_path), files_of(folder)
    with pytest.raises(
        ConfigError, match=r"not been run to its end \(3 of 3 rounds\): .*--resume, or give --unfinished"
    ):
        seal_run(folder, ROUNDS)
    assert files_of(folder) == files
    seal_run(folder, ROUNDS, is_unfinished_too=True)
    assert secrets_in(folder) == []
    assert spent(tmp_path) == before
    assert not read_charges(folder).is_closed


def test_a_search_that_is_not_done_leaves_no_trace_of_how_far_it_came(tmp_path):
    folder = tmp_path / "mr_mtl"
    make_run(folder, is_closed=False, has_store=False)
    for path in (folder / CHECKPOINTS).iterdir():
        path.rename(folder / path.name)
    make_checkpoint(folder, 2, part=SEARCH)
    before = spent(tmp_path)
    with pytest.raises(ConfigError, match="--unfinished"):
        seal_run(folder, ROUNDS)
    for path in folder.glob("round_*"):
        for one in path.iterdir():
            one.unlink()
        path.rmdir()
    seal_run(folder, ROUNDS, is_unfinished_too=True)
    assert files_of(folder) == KEPT - {"checkpoints/round_000003/checkpoint.json"}
    assert spent(tmp_path) == before
    with pytest.raises(ConfigError, match="was sealed"):
        checkpoints.load_latest(folder / SEARCH)


@pytest.mark.parametrize("key", [KEY, RunKey.from_test_seed(1)])
def test_a_run_of_the_first_version_is_put_on_record_before_its_key_goes(tmp_path, key):
    folder = tmp_path / "mr_mtl"
    make_run(folder, key=key)
    as_first_version(folder)
    with pytest.raises(ConfigError, match="3 of 4 rounds"):
        seal_run(folder, 4)
    (before,) = all_releases(tmp_path)
    assert before.run_id == ""
    seal_run(folder, ROUNDS)
    (after,) = all_releases(tmp_path)
    assert (after.ledger.to_json(), after.rounds) == (before.ledger.to_json(), before.rounds)
    assert after.non_private == before.non_private == (KNOWN_SEED if key.is_test_only else None)
    assert bool(why_without_bound([after])) == key.is_test_only
    assert secrets_in(folder) == []


def test_nothing_is_destroyed_of_a_run_whose_record_is_damaged_or_in_use(tmp_path):
    folder = tmp_path / "mr_mtl"
    make_run(folder)
    files = files_of(folder)
    with only_writer(folder):
        done = _in_another_process(f"seal_run(Path({str(folder)!r}), {ROUNDS})")
    assert "writes to" in done.stderr
    assert files_of(folder) == files
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.6", 1))
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged"):
        seal_run(folder, ROUNDS)
    assert files_of(folder) == files
    with pytest.raises(ConfigError, match="holds no run"):
        seal_run(tmp_path / "absent", ROUNDS)


def test_sealing_that_is_killed_before_any_change_of_the_disk_is_completed_by_sealing_again(tmp_path):
    step = amount(test=4, all=1)
    done = _in_another_process(f"runs.kill_at_changes({str(tmp_path)!r}, {step})")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[-1]["number"] >= 60
    assert len(rows) >= 60 // step
    assert [row["is_done"] for row in rows] == [False] * (len(rows) - 1) + [True]
    assert all(row["is_same"] for row in rows), "the record says the same whenever the process was killed"
    assert all(row["secrets"] == row["later_problems"] == [] for row in rows)
    assert {tuple(row["files"]) for row in rows} == {tuple(sorted(KEPT))}
    texts = {text.partition("though ")[2] for row in rows for text in row["problems"]}
    assert texts == {"the run is sealed: seal it again"}
    assert {row["left"] for row in rows} > {0, 1}


def test_what_is_removed_is_overwritten_before(tmp_path):
    path, link = tmp_path / "key", tmp_path / "link"
    path.write_bytes(b"secret" * 1000)
    link.hardlink_to(path)
    overwrite_and_remove(path)
    assert not path.exists()
    assert link.stat().st_size == 6000
    assert b"secret" not in link.read_bytes()


def _in_another_process(statement):
    """A process without TensorFlow, which may fork."""
    program = (
        "import sys; from pathlib import Path; from tests.training.record import runs;"
        f"from tff_pdp.training.record.sealing import seal_run; {statement};"
        "sys.exit('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 or "DataError" in done.stderr, done.stderr
    return done
