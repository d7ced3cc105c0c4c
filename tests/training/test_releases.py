"""The record of what was spent: it lasts, and what cannot be read is never passed over."""

import json

import pytest

from tff_pdp import files
from tff_pdp.errors import DataError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.accounting.accountants import Adjacency, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training import costs as releases
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.costs import EARLIER, all_releases, enter, set_aside


def ledger_of(*silos):
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, dict.fromkeys(silos, SiloBudget(8.0, 1e-4)))
    for silo in silos:
        ledger.append(silo, poisson_gaussian_event(0.1, 2.0, 1), 10, "DP-SGD training")
    return ledger


def save_run(output, name, ledger, key):
    run = Checkpoint(3, {}, (), [], ledger, key, "hash")
    checkpoints.save(output / name / "checkpoints", run)


def silos_on_record(output):
    return [sorted(release.ledger.budgets) for release in all_releases(output)]


def test_an_entry_and_the_name_of_its_file_are_flushed_to_disk(tmp_path, monkeypatch):
    flushed = []

    def sync(path):
        flushed.append((path, (tmp_path / EARLIER).read_text().count("\n")))
        files.sync(path)

    monkeypatch.setattr(releases, "sync", sync)
    enter(tmp_path, "mr_mtl", 3, ledger_of("a"))
    assert flushed == [(tmp_path / EARLIER, 1), (tmp_path, 1)]


def test_an_entry_stands_on_a_line_of_its_own_whatever_was_there(tmp_path):
    enter(tmp_path, "mr_mtl", 3, ledger_of("a"))
    path = tmp_path / EARLIER
    path.write_text(path.read_text().removesuffix("\n"))
    enter(tmp_path, "mr_mtl", 3, ledger_of("b"))
    enter(tmp_path, "mr_mtl", 3, ledger_of("c"))
    assert silos_on_record(tmp_path) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("torn", ['{"run": "personal', '{"run": "mr_mtl", "ledger": "{}"}', "[1]", '{"run": "mr_mtl"}'])
def test_a_line_that_is_no_entry_is_named(tmp_path, torn):
    enter(tmp_path, "mr_mtl", 3, ledger_of("a"))
    with open(tmp_path / EARLIER, "a") as file:
        file.write(torn)
    enter(tmp_path, "mr_mtl", 3, ledger_of("b"))
    with pytest.raises(DataError, match=rf"{EARLIER}: line 2 cannot be read .* Restore the file") as error:
        all_releases(tmp_path)
    assert str(tmp_path) in str(error.value)
    path = tmp_path / EARLIER
    path.write_text(path.read_text().replace(torn, ""))
    assert silos_on_record(tmp_path) == [["a"], ["b"]]


def test_a_replaced_run_is_entered_unless_its_key_can_be_guessed(tmp_path):
    save_run(tmp_path, "mr_mtl", ledger_of("a"), RunKey.from_entropy())
    save_run(tmp_path, "fed_avg", ledger_of("b"), RunKey.from_test_seed(1))
    found = {tuple(release.ledger.budgets): release.is_test_only for release in all_releases(tmp_path)}
    assert found == {("a",): False, ("b",): True}
    for name in ("mr_mtl", "fed_avg"):
        set_aside(tmp_path, tmp_path / name)
        assert not (tmp_path / name).exists()
    (entry,) = map(json.loads, (tmp_path / EARLIER).read_text().splitlines())
    assert (entry["run"], entry["rounds"]) == ("mr_mtl", 3)
    assert silos_on_record(tmp_path) == [["a"]]
