import collections
import dataclasses
import json
import stat

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.digests import write_json
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.errors import DataError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.accounting.accountants import Adjacency, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.training.checkpoint import KEPT, Checkpoint, load_latest, save


def make_checkpoint(round_number=3):
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"a/b": SiloBudget(4.0, 1e-5)})
    ledger.append("a/b", poisson_gaussian_event(0.1, 2.0, 1), 5, "DP-SGD training")
    weights = collections.OrderedDict([("dense/kernel", np.arange(6, dtype=np.float32).reshape(2, 3))])
    return Checkpoint(
        round_number=round_number,
        server_state=collections.OrderedDict(
            algorithm=collections.OrderedDict(weights=weights), aggregation=collections.OrderedDict(update=([], ()))
        ),
        client_ids=("a/b", ".."),
        client_states=[collections.OrderedDict(weights=weights), collections.OrderedDict()],
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
    assert loaded.client_ids == ("a/b", "..")
    array = loaded.client_states[0]["weights"]["dense/kernel"]
    np.testing.assert_array_equal(array, original.client_states[0]["weights"]["dense/kernel"])
    assert array.dtype == np.float32
    assert loaded.client_states[1] == {}
    server = loaded.server_state
    np.testing.assert_array_equal(server["algorithm"]["weights"]["dense/kernel"], array)
    assert server["aggregation"]["update"] == [[], []]


@pytest.mark.parametrize("arrangement", ["members", "columns", "stacks"])
def test_states_that_an_engine_keeps_come_back_in_their_order(tmp_path, arrangement):
    state_type = _tff.to_type(collections.OrderedDict(w=_tff.TensorType(np.float32, [2])))
    columns = {"w": np.arange(10, dtype=np.float32).reshape(5, 2)}
    states = ClientValues.from_columns(state_type, columns)
    if arrangement == "members":
        states.separate()
    if arrangement == "stacks":
        states.arrange([np.array([3, 0]), np.array([4, 2, 1])])
    ids = ("10", "9", "b", "a", "é/\\ü")
    server = collections.OrderedDict(w=tf.constant([1.5, 2.5]), rounds=tf.constant(7))
    original = dataclasses.replace(make_checkpoint(), server_state=server, client_ids=ids, client_states=states)
    save(tmp_path, original)
    loaded = load_latest(tmp_path)
    assert loaded.client_ids == ids
    assert [type(state["w"]) for state in loaded.client_states] == [np.ndarray] * 5
    np.testing.assert_array_equal([state["w"] for state in loaded.client_states], columns["w"])
    np.testing.assert_array_equal(loaded.server_state["w"], [1.5, 2.5])
    assert (loaded.server_state["w"].dtype, loaded.server_state["rounds"].dtype) == (np.float32, np.int32)


@pytest.mark.parametrize("ids", [("a/b",), ("a/b", "..", "c")])
def test_ids_and_states_of_different_numbers_are_not_saved(tmp_path, ids):
    with pytest.raises(ValueError, match="argument 2"):
        save(tmp_path, dataclasses.replace(make_checkpoint(), client_ids=ids))
    assert load_latest(tmp_path) is None


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


def test_what_the_hook_of_a_method_remembers_comes_back_also_from_earlier_versions(tmp_path):
    remembered = {"prox_weights": np.array([0.5, 2.0], np.float32), "window": {"rounds": np.int64(3)}}
    folder = save(tmp_path, dataclasses.replace(make_checkpoint(), hook=remembered))
    tf.nest.map_structure(np.testing.assert_array_equal, dict(load_latest(tmp_path).hook), remembered)
    content = json.loads((folder / "checkpoint.json").read_text())
    del content["digest"]
    content["structure"]["auto_prox"] = content["structure"].pop("hook")
    write_json(folder / "checkpoint.json", content)
    tf.nest.map_structure(np.testing.assert_array_equal, dict(load_latest(tmp_path).hook), remembered)
