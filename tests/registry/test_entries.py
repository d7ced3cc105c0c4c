"""The registry on disk: what is entered lasts, several processes may enter at once, and damage is named."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.registry.small_data import records, write_dataset
from tff_pdp import files, journal
from tff_pdp.errors import DataError, sentence_for_user
from tff_pdp.privacy.accounting.accountants import Adjacency, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.registry.entries import KEY_FILE, Registry, default_folder


def ledger_of(steps=10):
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"x": SiloBudget(50.0, 1e-4)})
    ledger.append("x", poisson_gaussian_event(0.1, 2.0, 1), steps, "DP-SGD training")
    return ledger


def begin(registry, run_id, **changed):
    values = {
        "records": "none",
        "record_set": None,
        "non_private": None,
        "ledger": ledger_of(),
        "rounds": 10,
    }
    registry.begin(run_id, "mr_mtl", Path("runs/mr_mtl"), **{**values, **changed})


def test_the_users_own_registry_lies_with_their_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "tff_pdp" / "registry"
    monkeypatch.setenv("HOME", str(tmp_path))
    # A relative path would be another place in each working directory.
    for value in ("state", None):
        monkeypatch.setenv("XDG_STATE_HOME", value) if value else monkeypatch.delenv("XDG_STATE_HOME")
        assert default_folder() == tmp_path / ".local" / "state" / "tff_pdp" / "registry"


def kinds_of_lines(registry):
    return [line["kind"] for line in journal.read(registry.path).lines]


def test_a_run_is_entered_once_and_may_be_raised_and_closed(tmp_path):
    registry = Registry(tmp_path / "registry")
    registry.close("nobody", ["1"], 3, None)
    assert registry.entries() == []
    begin(registry, "a", includes="s")
    begin(registry, "a", rounds=99)
    begin(registry, "b", ledger=None, non_private="privacy is switched off", record_set={"x": "north"})
    registry.raise_to("a", ["1"], 10, ledger_of(20))
    first, second = registry.entries()
    assert (first.run_id, first.upper.rounds, first.closed, first.includes) == ("a", 10, None, "s")
    assert first.upper.ledger.to_json() == ledger_of(20).to_json()
    assert Path(first.folder) == Path("runs/mr_mtl").absolute()
    assert second.upper.ledger is None
    assert (second.non_private, second.record_set) == ("privacy is switched off", {"x": "north"})
    for _ in range(2):
        registry.close("a", ["1", "2"], 7, ledger_of(7))
    registry.close("nobody", ["1"], 3, None)
    entry = registry.find("a")
    assert (entry.closed.rounds, entry.upper.ledger.to_json()) == (7, ledger_of(7).to_json())
    assert kinds_of_lines(registry) == ["opened", "began", "began", "raised", "closed"]


def test_a_closed_run_that_goes_on_counts_with_all_that_was_planned(tmp_path):
    """A copy was about to be replaced, and the run went on: closed by one, it is open again."""
    registry = Registry(tmp_path / "registry")
    begin(registry, "a")
    registry.close("a", ["1"], 0, None)
    assert registry.find("a").upper.rounds == 0
    for _ in range(2):
        registry.reserve("a", ["1", "2"])
    entry = registry.find("a")
    assert (entry.closed, entry.upper.rounds, entry.upper.ledger.to_json()) == (None, 10, ledger_of(10).to_json())
    for _ in range(2):
        registry.raise_to("a", ["1", "2"], 12, ledger_of(12))
    assert registry.find("a").upper.rounds == 12
    assert kinds_of_lines(registry) == ["opened", "began", "closed", "reserved", "raised"]


def test_a_copy_that_lacks_what_the_run_has_done_takes_nothing_back(tmp_path):
    registry = Registry(tmp_path / "registry")
    begin(registry, "a")
    registry.reserve("a", ["1", "2"])
    registry.reserve("a", ["1", "2", "3"])
    # One that does the same may do so.
    registry.reserve("a", ["1", "2", "3"])
    with pytest.raises(DataError, match="has no entry of the run that is about to continue"):
        registry.reserve("nobody", ["9"])
    assert registry.find("a").head == "3"
    before = registry.path.read_bytes()
    # Older, or on another way, however far.
    for chains in (["1", "2"], ["1", "2", "4"], ["1", "2", "4", "5", "6"]):
        for refused in (lambda chains: registry.reserve("a", chains), lambda c: registry.raise_to("a", c, 9, None)):
            with pytest.raises(DataError, match=r"copy of the run that began in .*runs/mr_mtl was continued"):
                refused(chains)
        registry.close("a", chains[:2], 10, ledger_of(3))
    assert registry.path.read_bytes() == before
    # What went on in another way has released something, too.
    for _ in range(2):
        registry.close("a", ["1", "2", "4"], 10, ledger_of(3))
    assert [entry.run_id for entry in registry.entries()] == ["a", "a:4"]
    assert (registry.entries()[1].upper.rounds, registry.entries()[1].records) == (10, registry.find("a").records)
    assert (registry.find("a").closed, registry.find("a").upper.rounds) == (None, 10)
    registry.close("a", ["1", "2", "3", "4"], 7, ledger_of(7))
    registry.close("a", ["1", "2", "3"], 3, ledger_of(3))
    assert (registry.find("a").upper.rounds, registry.find("a").head) == (7, "4")


def test_a_copy_lowers_nothing_that_was_raised_for_the_run(tmp_path):
    registry = Registry(tmp_path / "registry")
    begin(registry, "a")
    registry.reserve("a", ["1"])
    # Two that would draw anew, from other rounds on: the second is refused before it says what it would cost.
    registry.raise_to("a", ["1", "2"], 10, ledger_of(15))
    with pytest.raises(DataError, match="was continued"):
        registry.raise_to("a", ["1", "3"], 10, ledger_of(12))
    assert (registry.find("a").head, registry.find("a").planned.ledger.to_json()) == ("2", ledger_of(15).to_json())


def as_earlier_version(registry, *, reached=None):
    """Takes from a registry's lines where runs' own records have been."""
    lines = [dict(line) for line in journal.read(registry.path).lines]
    for line in lines:
        if line.pop("head", None) is not None and reached is not None and line["kind"] != "raised":
            line["reached"] = list(reached)
    journal.write(registry.path, lines)


@pytest.mark.parametrize("reached", [None, (3, 9)])
def test_entries_of_earlier_versions_say_only_how_far_the_run_came(tmp_path, reached):
    registry = Registry(tmp_path / "registry")
    for run_id in "abc":
        begin(registry, run_id)
        registry.reserve(run_id, ["1", "2", "3"])
    registry.raise_to("b", ["1", "2", "3"], 12, ledger_of(12))
    registry.close("c", ["1", "2", "3"], 9, ledger_of(9))
    as_earlier_version(registry, reached=reached)
    begun, raised, closed = registry.entries()
    assert (begun.upper.ledger.to_json(), raised.upper.ledger.to_json()) == tuple(
        ledger_of(steps).to_json() for steps in (10, 12)
    )
    assert (closed.closed.rounds, closed.upper.ledger.to_json()) == (9, ledger_of(9).to_json())
    for entry in (begun, raised, closed):
        assert (entry.heads, entry.was_at(["x", "y", "z"])) == ((), True)
        assert entry.was_at(["x", "y"]) == (reached is None), "an older copy"
    # Whatever its number of lines, a copy that has spent less takes nothing back.
    registry.close("c", ["1", "2", "3", "4"], 9, ledger_of(8))
    assert registry.find("c").upper.ledger.to_json() == ledger_of(9).to_json()
    assert not closed.is_in(["x", "y", "z"], (9, ledger_of(8).num_events))
    assert not closed.is_in(["x", "y", "z"], (10, ledger_of(8).num_events)), "further, by fewer events"
    # From here on as any other.
    registry.reserve("a", ["1", "2", "3", "4"])
    with pytest.raises(DataError, match="was continued"):
        registry.reserve("a", ["1", "2", "3", "5"])


def test_what_an_earlier_version_raised_is_read(tmp_path):
    """It did not say for how many rounds."""
    registry = Registry(tmp_path / "registry")
    begin(registry, "a")
    registry.raise_to("a", ["1"], 10, ledger_of(12))
    as_earlier_version(registry)
    lines = [dict(line) for line in journal.read(registry.path).lines]
    del lines[-1]["rounds"]
    journal.write(registry.path, lines)
    (entry,) = registry.entries()
    assert (entry.planned.rounds, entry.planned.ledger.to_json()) == (10, ledger_of(12).to_json())


def test_only_the_owner_reads_the_key(tmp_path):
    registry = Registry(tmp_path / "registry")
    begin(registry, "a")
    assert (registry.folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert registry.folder.stat().st_mode & 0o777 == 0o700


def test_digests_of_a_data_set_are_kept_once(tmp_path):
    registry = Registry(tmp_path / "registry")
    dataset = write_dataset(tmp_path / "data", {"x": records(0, 5)})
    name = registry.keep_dataset(dataset, ("train",))
    assert registry.keep_dataset(dataset, ("train",)) == name
    assert registry.keep_dataset(dataset, ("train", "validation")) != name
    assert len(registry.records(name).digests) == 5
    assert registry.keep_examples(["y"], [records(0, 5)]) not in ("", name)
    # Of some clients, with what tells other forms of the same raw files.
    some = registry.records(registry.keep_clients(dataset, ["x"]))
    assert (some.form, some.sources) == (registry.records(name).form, registry.records(name).sources)
    assert some.digests.tolist() == registry.records(name).digests.tolist()
    assert sum(line["kind"] == "records" for line in journal.read(registry.path).lines) == 4


def test_one_damaged_byte_is_refused_and_named(tmp_path):
    registry = Registry(tmp_path / "registry")
    dataset = write_dataset(tmp_path / "data", {"x": records(0, 5)})
    name = registry.keep_dataset(dataset, ("train",))
    begin(registry, "a", records=name)
    registry.close("a", ["1"], 7, ledger_of(7))

    def use():
        registry.entries()
        registry.records(name)
        registry.records(registry.keep_examples(["y"], [records(0, 1)]))

    use()
    for path in sorted(path for path in registry.folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 25)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(DataError) as error:
                use()
            assert path.name in str(error.value) or journal.head_path(registry.path).name in str(error.value)
        path.write_bytes(whole)
    use()


@pytest.mark.parametrize("name", ["registry.jsonl", "registry.head", "records.key", "records"])
def test_a_file_that_is_missing_is_named(tmp_path, name):
    registry = Registry(tmp_path / "registry")
    kept = registry.keep_dataset(write_dataset(tmp_path / "data", {"x": records(0, 5)}), ("train",))
    path = registry.folder / name
    path.rename(tmp_path / "away")
    with pytest.raises(DataError, match=name):
        registry.records(kept)
        registry.key()


BEGIN = """
import sys
from pathlib import Path
from tff_pdp.registry.entries import Registry
for number in range(20):
    Registry(sys.argv[1]).begin(f"{sys.argv[2]}{number}", "m", Path("f"), records="", record_set=None,
        non_private="none", ledger=None, rounds=1)
"""


def test_two_processes_that_enter_at_once_are_both_there(tmp_path):
    commands = [[sys.executable, "-c", BEGIN, str(tmp_path / "registry"), name] for name in "ab"]
    running = [subprocess.Popen(command, env=os.environ) for command in commands]
    assert [process.wait(timeout=100) for process in running] == [0, 0]
    found = {entry.run_id for entry in Registry(tmp_path / "registry").entries()}
    assert found == {f"{name}{number}" for name in "ab" for number in range(20)}


@pytest.mark.parametrize(
    "left",
    [
        {},
        {"registry.head": b""},
        {"registry.head": f"{journal.GENESIS}\n".encode()},
        {"registry.head": f"{journal.GENESIS}\n".encode(), "registry.jsonl": b""},
        {"registry.head": f"{journal.GENESIS}\n".encode(), "registry.jsonl": b"", "records.new": b"half"},
        {"registry.head": f"{journal.GENESIS}\n".encode(), "registry.jsonl": b"", KEY_FILE: bytes(range(32))},
        {
            "registry.head": f"{journal.GENESIS}\n".encode(),
            "registry.jsonl": b'{"kind":"op',
            KEY_FILE: bytes(range(32)),
        },
    ],
    ids=lambda left: " ".join(left) or "nothing",
)
def test_a_registry_whose_first_command_was_stopped_is_begun_by_the_next(tmp_path, left):
    registry = Registry(tmp_path / "registry")
    registry.folder.mkdir()
    for name, content in left.items():
        (registry.folder / name).write_bytes(content)
    name = registry.keep_dataset(write_dataset(tmp_path / "data", {"x": records(0, 3)}), ("train",))
    begin(registry, "a", records=name)
    assert [entry.run_id for entry in registry.entries()] == ["a"]
    registry.records(name)


def test_files_of_digests_that_were_not_finished_are_removed(tmp_path):
    registry = Registry(tmp_path / "registry")
    begin(registry, "a")
    (registry.folder / "records").mkdir()
    attempt = registry.folder / "records" / f"name.npz.{'0a' * 16}"
    attempt.write_bytes(b"half")
    name = registry.keep_dataset(write_dataset(tmp_path / "data", {"x": records(0, 3)}), ("train",))
    assert [path.name for path in attempt.parent.iterdir()] == [f"{name}.npz"]


def test_a_full_disk_is_one_line_and_leaves_the_registry_as_it_was(tmp_path, monkeypatch):
    registry = Registry(tmp_path / "registry")
    begin(registry, "a")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in ((journal.os, "pwrite"), (files.os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(OSError, match="No space left") as error:
                begin(registry, "b")
        assert "No space left" in sentence_for_user(error.value)
        assert "registry" in sentence_for_user(error.value)
    assert "a" in {entry.run_id for entry in registry.entries()}
    begin(registry, "b")
    assert [entry.run_id for entry in registry.entries()] == ["a", "b"]
