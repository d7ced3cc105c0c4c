"""The record of what was spent: it lasts, and what cannot be read is never passed over."""

import json

import pytest

from tff_pdp import journal
from tff_pdp.errors import DataError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.accounting.accountants import Adjacency, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import CHARGES_FILE, ChargesWriter, RunIdentity
from tff_pdp.training.record.releases import (
    EARLIER,
    KNOWN_SEED,
    NO_PRIVACY,
    Release,
    all_releases,
    enter,
    set_aside,
    surroundings_of,
    why_without_bound,
)


def ledger_of(*silos):
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, dict.fromkeys(silos, SiloBudget(8.0, 1e-4)))
    for silo in silos:
        ledger.append(silo, poisson_gaussian_event(0.1, 2.0, 1), 10, "DP-SGD training")
    return ledger


def a_checkpoint(round_number, ledger, key, **others):
    empty = {"server_state": {}, "client_ids": (), "client_states": [], "config_hash": "hash"}
    return Checkpoint(round_number=round_number, ledger=ledger, run_key=key, **empty, **others)


def save_run(output, name, ledger, key):
    run = a_checkpoint(3, ledger, key)
    checkpoints.save(output / name / "checkpoints", run)


def silos_on_record(output):
    return [sorted(release.ledger.budgets) for release in all_releases(output)]


def entry_of(*silos):
    return Release(ledger_of(*silos), None, "mr_mtl", 3)


def old_line(*silos):
    return json.dumps({"run": "mr_mtl", "rounds": 3, "ledger": ledger_of(*silos).to_json()}) + "\n"


def start_run(folder, ledger, key=None, non_private=None, through_round=4):
    """A run with charges and one checkpoint, after its third round."""
    folder.mkdir(parents=True)
    key = key or RunKey.from_entropy()
    identity = RunIdentity(folder.name, non_private, key.fingerprint(), "hash", journal.GENESIS)
    with ChargesWriter(folder) as writer:
        writer.open_run(identity, ledger)
        if through_round:
            writer.reserve(through_round, ledger, {})
    run = a_checkpoint(min(3, through_round), ledger, key, surroundings=surroundings_of(folder, ()))
    checkpoints.save(folder / "checkpoints", run)
    return identity


def test_entries_come_back_in_order(tmp_path):
    for silo in "abc":
        enter(tmp_path, entry_of(silo))
    assert silos_on_record(tmp_path) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("tail", ["", '{"run": "personal', '{"run": "mr_mtl", "ledger": "{}"}', "[1]"])
def test_lines_of_the_first_version_count_and_are_chained_by_the_next_entry(tmp_path, tail):
    """What a crash had cut off is about a run whose folder is still there."""
    path = tmp_path / EARLIER
    path.write_text(old_line("a") + old_line("b") + tail)
    assert silos_on_record(tmp_path) == [["a"], ["b"]]
    enter(tmp_path, entry_of("c"))
    assert silos_on_record(tmp_path) == [["a"], ["b"], ["c"]]
    assert [json.loads(line)["chain"] for line in path.read_text().splitlines()] == list(journal.read(path).chains)


def test_a_whole_line_of_the_first_version_counts_without_its_end(tmp_path):
    (tmp_path / EARLIER).write_text(old_line("a").rstrip("\n"))
    assert silos_on_record(tmp_path) == [["a"]]


@pytest.mark.parametrize("torn", ['{"run": "personal', '{"run": "mr_mtl", "ledger": "{}"}', "[1]", '{"run": "mr_mtl"}'])
def test_a_line_of_the_first_version_that_is_no_entry_is_named(tmp_path, torn):
    (tmp_path / EARLIER).write_text(old_line("a") + torn + "\n" + old_line("b"))
    with pytest.raises(DataError, match=rf"{EARLIER}: line 2 cannot be read .* restore the file") as error:
        all_releases(tmp_path)
    assert str(tmp_path) in str(error.value)
    with pytest.raises(DataError, match="line 2"):
        enter(tmp_path, entry_of("c"))


@pytest.mark.parametrize("torn", ['{"run": "personal', '{"run": "mr_mtl", "ledger": "{}"}', "[1]", '{"run": "mr_mtl"}'])
def test_a_torn_line_is_passed_over_and_mended_by_the_next_entry(tmp_path, torn):
    enter(tmp_path, entry_of("a"))
    with open(tmp_path / EARLIER, "a") as file:
        file.write(torn)
    assert silos_on_record(tmp_path) == [["a"]]
    enter(tmp_path, entry_of("b"))
    assert silos_on_record(tmp_path) == [["a"], ["b"]]


def test_a_replaced_run_is_entered_with_all_that_it_may_have_spent(tmp_path):
    ids = {start_run(tmp_path / "mr_mtl", ledger_of("a")).run_id}
    ids |= {start_run(tmp_path / "fed_avg", ledger_of("b"), RunKey.from_test_seed(1), KNOWN_SEED).run_id}
    ids |= {start_run(tmp_path / "finetune", None, non_private=NO_PRIVACY).run_id}
    start_run(tmp_path / "local_only", ledger_of("c"), through_round=0)
    before = {(one.run, one.run_id, one.rounds, one.non_private) for one in all_releases(tmp_path)}
    assert {rounds for _, _, rounds, _ in before} == {4}
    for name in ("mr_mtl", "fed_avg", "finetune", "local_only"):
        set_aside(tmp_path, tmp_path / name)
        assert not (tmp_path / name).exists()
    after = all_releases(tmp_path)
    assert {(one.run, one.run_id, one.rounds, one.non_private) for one in after} == before
    assert {one.run_id for one in after} == ids, "what had released nothing is not on record"
    assert {one.run: one.non_private for one in after} == {
        "mr_mtl": None,
        "fed_avg": KNOWN_SEED,
        "finetune": NO_PRIVACY,
    }
    assert why_without_bound([one for one in after if one.run == "mr_mtl"]) == ""
    assert why_without_bound([one for one in after if one.run != "fed_avg"]) == (
        f"a run on record (finetune) has no bound: {NO_PRIVACY}"
    )


def test_a_search_that_made_more_runs_than_there_are_rounds_counts(tmp_path):
    identity = start_run(tmp_path / "mr_mtl", ledger_of("a"), through_round=4)
    (tmp_path / "mr_mtl" / "checkpoints").rename(tmp_path / "mr_mtl" / "search")
    key = checkpoint_files.newest(tmp_path / "mr_mtl" / "search").run_key
    kept = surroundings_of(tmp_path / "mr_mtl", ())
    state = a_checkpoint(9, ledger_of("a"), key, surroundings=kept)
    checkpoints.save(tmp_path / "mr_mtl" / "search", state)
    assert [release.run_id for release in all_releases(tmp_path)] == [identity.run_id]
    set_aside(tmp_path, tmp_path / "mr_mtl")
    assert [release.run_id for release in all_releases(tmp_path)] == [identity.run_id]


def test_a_run_that_was_entered_and_not_yet_removed_counts_once(tmp_path, monkeypatch):
    start_run(tmp_path / "mr_mtl", ledger_of("a"))
    with monkeypatch.context() as patch:
        patch.setattr("tff_pdp.training.record.releases.discard", lambda folder: None)
        set_aside(tmp_path, tmp_path / "mr_mtl")
    assert silos_on_record(tmp_path) == [["a"]]
    set_aside(tmp_path, tmp_path / "mr_mtl")
    assert silos_on_record(tmp_path) == [["a"]]
    assert len(journal.read(tmp_path / EARLIER).lines) == 1


def test_a_run_of_the_first_version_counts_and_is_entered_with_the_reason_it_has_no_bound(tmp_path):
    save_run(tmp_path, "mr_mtl", ledger_of("a"), RunKey.from_entropy())
    save_run(tmp_path, "fed_avg", ledger_of("b"), RunKey.from_test_seed(1))
    found = {tuple(release.ledger.budgets): release.non_private for release in all_releases(tmp_path)}
    assert found == {("a",): None, ("b",): KNOWN_SEED}
    for name in ("mr_mtl", "fed_avg"):
        set_aside(tmp_path, tmp_path / name)
        assert not (tmp_path / name).exists()
    assert {(one.run, one.rounds, one.non_private) for one in all_releases(tmp_path)} == {
        ("mr_mtl", 3, None),
        ("fed_avg", 3, KNOWN_SEED),
    }


@pytest.mark.parametrize("lost", [CHARGES_FILE, "charges.head"])
def test_lost_charges_show(tmp_path, lost):
    start_run(tmp_path / "mr_mtl", ledger_of("a"))
    (tmp_path / "mr_mtl" / lost).unlink()
    with pytest.raises(DataError, match=r"charges\.(jsonl|head)"):
        all_releases(tmp_path)
    with pytest.raises(DataError, match=r"charges\.(jsonl|head)"):
        set_aside(tmp_path, tmp_path / "mr_mtl")


def test_charges_that_were_both_lost_or_are_another_runs_show(tmp_path):
    start_run(tmp_path / "mr_mtl", ledger_of("a"))
    start_run(tmp_path / "fed_avg", ledger_of("a"))
    for name in (CHARGES_FILE, "charges.head"):
        (tmp_path / "fed_avg" / name).replace(tmp_path / "mr_mtl" / name)
    for _ in range(2):
        with pytest.raises(DataError, match=CHARGES_FILE):
            all_releases(tmp_path)
        for name in (CHARGES_FILE, "charges.head"):
            (tmp_path / "mr_mtl" / name).unlink(missing_ok=True)


def test_a_lost_record_of_earlier_releases_shows_in_each_run_that_began_after_it(tmp_path):
    enter(tmp_path, entry_of("a"))
    start_run(tmp_path / "mr_mtl", ledger_of("a"))
    assert silos_on_record(tmp_path) == [["a"], ["a"]]
    for name in (EARLIER, "earlier_releases.head"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{EARLIER} is missing"):
        all_releases(tmp_path)
