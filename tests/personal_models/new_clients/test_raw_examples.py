"""New clients' examples come in the form of the experiment's own raw data, and are prepared as those of training."""

import json

import numpy as np
import pytest

from beam_pipelines.sources.silo_files import write_silo_arrays
from tests.personal_models.new_clients.test_personalize import SILOS, config_of, save, silo
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import DataError
from tff_pdp.models.dense import build_linear
from tff_pdp.personal_models.new_clients.examples import DEAD_LETTERS, prepared_examples, read_new_clients

MODEL = build_linear((2,), 2)


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path, SILOS, "mr_mtl", {})


@pytest.mark.parametrize("form", ["npz", "json"])
def test_raw_data_of_the_experiments_kind_are_prepared(config, tmp_path, form, capsys):
    new = [silo("harbour", 11), silo("island", 12, size=40), silo("tiny", 13, size=3)]
    path = tmp_path / f"new.{form}"
    if form == "npz":
        write_silo_arrays(path, new)
    else:
        user_data = {one.name: {"x": one.x.tolist(), "y": one.y.tolist()} for one in new}
        sizes = [len(one.y) for one in new]
        path.write_text(json.dumps({"users": list(user_data), "num_samples": sizes, "user_data": user_data}))
    with prepared_examples(config, path) as prepared:
        assert ClientDataset.open(prepared).client_ids == ("harbour", "island")
        found = read_new_clients(prepared, ["island"], MODEL)
    # Shares of the splits, the least number of examples and the meaning of labels are the experiment's.
    assert (len(found.train[0].y), len(found.held_out[0].y)) == (24, 16)
    assert set(found.train[0].y.tolist()) == {0, 1}
    assert not prepared.exists()
    assert "left out for the reason client_below_min_examples: 3 examples, and 1 clients" in capsys.readouterr().err


def test_a_file_of_one_client_and_a_dataset_are_used_as_they_are(config, tmp_path):
    one = save(tmp_path / "one.npz", silo("harbour", 11))
    with prepared_examples(config, one) as prepared:
        assert prepared == one
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "manifest.json").touch()
    with prepared_examples(config, tmp_path / "clients") as prepared:
        assert prepared == tmp_path / "clients"


def test_refusals_say_what_is_taken(config, tmp_path):
    with (
        pytest.raises(DataError, match=r"none: no such file or folder.*raw data of the kind silo_files"),
        prepared_examples(config, tmp_path / "none"),
    ):
        pass
    one = save(tmp_path / "one.npz", silo("harbour", 11))
    for ids, said in (((), "no id is given"), (("a", "b"), "2 ids are given")):
        with pytest.raises(DataError, match=f"has x and y of one client, and {said}: name the client with exactly one"):
            read_new_clients(one, ids, MODEL)
    bad = silo("harbour", 11)
    bad.x[:60] = np.nan
    write_silo_arrays(tmp_path / "bad.npz", [bad])
    with (
        pytest.raises(DataError, match=r"50\.0% of 120 examples cannot be used"),
        prepared_examples(config, tmp_path / "bad.npz"),
    ):
        pass
    # Unusable records are still there when the temporary folder is gone.
    letters = list((tmp_path / "run" / DEAD_LETTERS).glob("*.jsonl"))
    assert sum(len(path.read_text().splitlines()) for path in letters) == 60
