"""What is on record of a run is never less than what the run has spent."""

import json

import pytest

from tff_pdp.errors import DataError
from tff_pdp.privacy.accounting.accountants import Adjacency, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.training.record import journal
from tff_pdp.training.record.charges import CHARGES_FILE, ChargesWriter, RunIdentity, read_charges

ARITHMETIC = {"tensorflow": "2.14.1"}


def ledger_after(rounds):
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"a": SiloBudget(8.0, 1e-4)})
    ledger.append("a", poisson_gaussian_event(0.1, 2.0, 1), rounds, "DP-SGD training")
    return ledger


def identity(non_private=None):
    return RunIdentity.new("mr_mtl", non_private, "f" * 32, "hash", journal.GENESIS)


def rounds_charged(folder):
    ledger = read_charges(folder).ledger
    return sum(entry.count for entry in ledger.entries)


def test_nothing_is_on_record_before_a_run_begins(tmp_path):
    assert read_charges(tmp_path) is None
    assert read_charges(tmp_path / "absent") is None
    with ChargesWriter(tmp_path):
        pass
    assert read_charges(tmp_path) is None


def test_a_reservation_counts_until_it_is_given_back(tmp_path):
    with ChargesWriter(tmp_path) as writer:
        own = identity()
        writer.open_run(own, ledger_after(0), ARITHMETIC)
        opened = read_charges(tmp_path)
        assert (opened.identity, opened.through_round, opened.is_closed) == (own, 0, False)
        writer.reserve(4, ledger_after(4), attempt=0, arithmetic=ARITHMETIC)
        reserved = read_charges(tmp_path)
        assert (reserved.through_round, reserved.attempt, rounds_charged(tmp_path)) == (4, 0, 4)
        writer.reserve(8, ledger_after(9), attempt=1, arithmetic={"tensorflow": "2.15"})
        writer.give_back(6, ledger_after(7))
        closed = writer.charges
    found = read_charges(tmp_path)
    assert (found.through_round, found.is_closed, rounds_charged(tmp_path)) == (6, True, 7)
    assert (found.attempt, found.arithmetic, found.identity) == (1, {"tensorflow": "2.15"}, own)
    assert found.head == closed.head
    assert {opened.head, reserved.head} < set(found.chains)


def test_a_run_without_privacy_says_why(tmp_path):
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity("privacy is switched off"), None, {})
        writer.reserve(3, None, attempt=0, arithmetic={})
    charges = read_charges(tmp_path)
    assert (charges.ledger, charges.non_private, charges.through_round) == (None, "privacy is switched off", 3)


def test_a_second_run_needs_a_record_of_its_own(tmp_path):
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), None, {})
        with pytest.raises(DataError, match="has a run already"):
            writer.open_run(identity(), None, {})


def test_a_reservation_that_was_cut_off_had_not_been_acted_upon(tmp_path):
    path = tmp_path / CHARGES_FILE
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), ledger_after(0), ARITHMETIC)
        writer.reserve(4, ledger_after(4), attempt=0, arithmetic=ARITHMETIC)
    with open(path, "ab") as file:
        file.write(b'{"attempt":0,"kind":"reser')
    assert rounds_charged(tmp_path) == 4
    with ChargesWriter(tmp_path) as writer:
        writer.reserve(8, ledger_after(8), attempt=0, arithmetic=ARITHMETIC)
    assert rounds_charged(tmp_path) == 8


def test_no_cut_and_no_changed_byte_lowers_what_was_spent(tmp_path):
    path = tmp_path / CHARGES_FILE
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), ledger_after(0), ARITHMETIC)
        writer.reserve(4, ledger_after(4), attempt=0, arithmetic=ARITHMETIC)
    stored = path.read_bytes()
    for place in range(0, len(stored), 7):
        for damaged in (stored[:place], stored[:place] + bytes([stored[place] ^ 2]) + stored[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=CHARGES_FILE):
                read_charges(tmp_path)


@pytest.mark.parametrize(
    "change", [{"format_version": 7}, {"ledger": "{}"}, {"kind": "closed"}, {"run_id": None}, {"arithmetic": None}]
)
def test_lines_that_are_no_charges_are_named(tmp_path, change):
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), ledger_after(0), ARITHMETIC)
    line = json.loads((tmp_path / CHARGES_FILE).read_text())
    line.pop("chain")
    changed = {**line, **change}
    changed = {key: value for key, value in changed.items() if value is not None}
    journal.write(tmp_path / CHARGES_FILE, [changed])
    with pytest.raises(DataError, match=CHARGES_FILE):
        read_charges(tmp_path)
