"""What is on record of a run is never less than what the run has spent."""

import json
import subprocess
import sys

import pytest

from tff_pdp import journal
from tff_pdp.errors import DataError
from tff_pdp.privacy.accounting.accountants import Adjacency, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.training.record.charges import CHARGES_FILE, ChargesWriter, RunIdentity, read_charges

ARITHMETIC = {"tensorflow": "2.14.1"}


def ledger_after(rounds):
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"a": SiloBudget(8.0, 1e-4)})
    ledger.append("a", poisson_gaussian_event(0.1, 2.0, 1), rounds, "DP-SGD training")
    return ledger


def identity(non_private=None):
    return RunIdentity("mr_mtl", non_private, "f" * 32, "hash", journal.GENESIS)


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
        writer.open_run(own, ledger_after(0))
        opened = read_charges(tmp_path)
        assert (opened.identity, opened.through_round, opened.is_closed) == (own, 0, False)
        writer.reserve(4, ledger_after(4), ARITHMETIC)
        reserved = read_charges(tmp_path)
        assert (reserved.through_round, reserved.attempt.number, rounds_charged(tmp_path)) == (4, 0, 4)
        writer.reserve(8, ledger_after(9), ARITHMETIC)
        writer.close_run(8, ledger_after(9))
        closed = writer.charges
    found = read_charges(tmp_path)
    assert (found.through_round, found.is_closed, rounds_charged(tmp_path)) == (8, True, 9)
    assert found.identity == own
    assert found.head == closed.head
    assert {opened.head, reserved.head} < set(found.chains)


def test_rounds_that_are_drawn_anew_are_charged_beside_all_before(tmp_path):
    other = {"tensorflow": "2.15"}
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), ledger_after(0))
        writer.reserve(4, ledger_after(4), ARITHMETIC)
        first = writer.charges.attempt
        assert (first.number, first.first_round, first.can_be_repeated(2, ARITHMETIC)) == (0, 1, True)
        assert not first.can_be_repeated(3, other)
        assert first.can_be_repeated(4, other), "no round after the fourth has been run"
        writer.redraw(3, writer.charges.ledger)
        assert (writer.charges.through_round, rounds_charged(tmp_path)) == (4, 4)
        writer.reserve(3, ledger_after(5), other)
    second = read_charges(tmp_path).attempt
    assert (second.number, second.first_round) == (1, 3)
    assert (sum(entry.count for entry in second.ledger.entries), rounds_charged(tmp_path)) == (4, 5)
    assert second.can_be_repeated(2, other)
    assert not second.can_be_repeated(2, ARITHMETIC)


def test_a_run_without_privacy_says_why(tmp_path):
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity("privacy is switched off"), None)
        writer.reserve(3, None, {})
    charges = read_charges(tmp_path)
    assert (charges.ledger, charges.identity.non_private, charges.through_round) == (None, "privacy is switched off", 3)


def test_a_second_run_needs_a_record_of_its_own(tmp_path):
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), None)
        with pytest.raises(DataError, match="has a run already"):
            writer.open_run(identity(), None)


def test_a_reservation_that_was_cut_off_had_not_been_acted_upon(tmp_path):
    path = tmp_path / CHARGES_FILE
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), ledger_after(0))
        writer.reserve(4, ledger_after(4), ARITHMETIC)
    with open(path, "ab") as file:
        file.write(b'{"attempt":0,"kind":"reser')
    assert rounds_charged(tmp_path) == 4
    with ChargesWriter(tmp_path) as writer:
        writer.reserve(8, ledger_after(8), ARITHMETIC)
    assert rounds_charged(tmp_path) == 8


def test_no_cut_and_no_changed_byte_lowers_what_was_spent(tmp_path):
    path = tmp_path / CHARGES_FILE
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), ledger_after(0))
        writer.reserve(4, ledger_after(4), ARITHMETIC)
    stored = path.read_bytes()
    for place in range(0, len(stored), 7):
        for damaged in (stored[:place], stored[:place] + bytes([stored[place] ^ 2]) + stored[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=CHARGES_FILE):
                read_charges(tmp_path)


@pytest.mark.parametrize(
    "change", [{"format_version": 7}, {"ledger": "{}"}, {"kind": "closed"}, {"kind": "spent"}, {"run_id": None}]
)
def test_lines_that_are_no_charges_are_named(tmp_path, change):
    with ChargesWriter(tmp_path) as writer:
        writer.open_run(identity(), ledger_after(0))
    line = json.loads((tmp_path / CHARGES_FILE).read_text())
    line.pop("chain")
    changed = {**line, **change}
    changed = {key: value for key, value in changed.items() if value is not None}
    journal.write(tmp_path / CHARGES_FILE, [changed])
    with pytest.raises(DataError, match=CHARGES_FILE):
        read_charges(tmp_path)


def test_the_record_is_read_without_tensorflow():
    modules = "charges, releases, arithmetic, checkpoint_files, all_runs"
    program = (
        f"import sys; from tff_pdp import digests, journal; from tff_pdp.training.record import {modules}; "
        "sys.exit('tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
