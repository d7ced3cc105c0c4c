import collections
import json
import stat

import numpy as np
import pytest

from tff_pdp.errors import DataError
from tff_pdp.privacy.accountants import Adjacency, poisson_gaussian_event
from tff_pdp.privacy.budgets import SiloBudget
from tff_pdp.privacy.ledger import Ledger
from tff_pdp.runtime.checkpoint import KEPT, Checkpoint, load_latest, save
from tff_pdp.runtime.run_key import RunKey


def make_checkpoint(round_number=3):
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"a/b": SiloBudget(4.0, 1e-5)})
    ledger.append("a/b", poisson_gaussian_event(0.1, 2.0, 1), 5, "DP-SGD training")
    weights = collections.OrderedDict([("dense/kernel", np.arange(6, dtype=np.float32).reshape(2, 3))])
    return Checkpoint(
        round_number=round_number,
        server_state=collections.OrderedDict(
            algorithm=collections.OrderedDict(weights=weights), aggregators=collections.OrderedDict(update=([], ()))
        ),
        client_states={"a/b": collections.OrderedDict(weights=weights), "..": collections.OrderedDict()},
        ledger=ledger,
        run_key=RunKey.from_entropy(),
        config_hash="hash",
    )


def test_everything_comes_back(tmp_path):
    original = make_checkpoint()
    save(tmp_path, original)
    loaded = load_latest(tmp_path)
    assert loaded.round_number == 3
    assert loaded.config_hash == "hash"
    assert loaded.run_key == original.run_key
    assert loaded.ledger.to_json() == original.ledger.to_json()
    assert list(loaded.client_states) == ["a/b", ".."]
    array = loaded.client_states["a/b"]["weights"]["dense/kernel"]
    np.testing.assert_array_equal(array, original.client_states["a/b"]["weights"]["dense/kernel"])
    assert array.dtype == np.float32


def test_the_run_key_is_readable_by_its_owner_alone(tmp_path):
    folder = save(tmp_path, make_checkpoint())
    assert stat.S_IMODE((folder / "run_key.json").stat().st_mode) == 0o600


def test_old_checkpoints_are_removed_and_unfinished_ones_not_read(tmp_path):
    for number in range(1, 5):
        save(tmp_path, make_checkpoint(number))
    assert len(list(tmp_path.iterdir())) == KEPT
    unfinished = tmp_path / ".round_000009.tmp"
    unfinished.mkdir()
    (unfinished / "checkpoint.json").write_text(json.dumps({"round_number": 9}))
    assert load_latest(tmp_path).round_number == 4


def test_nothing_there(tmp_path):
    assert load_latest(tmp_path / "absent") is None


@pytest.mark.parametrize("damage", [lambda whole: b"not an archive", lambda whole: whole[: len(whole) // 2]])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    folder = save(tmp_path, make_checkpoint())
    whole = (folder / "state.npz").read_bytes()
    (folder / "state.npz").write_bytes(damage(whole))
    with pytest.raises(DataError, match="round_000003"):
        load_latest(tmp_path)
