"""Refusals of new clients' examples name what is taken, and keep what cannot be used."""

import numpy as np
import pytest

from beam_pipelines.sources.silo_files import write_silo_arrays
from tests.personal_models.new_clients.test_personalize import SILOS, config_of, save, silo
from tff_pdp.errors import DataError
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.models.dense import build_linear
from tff_pdp.personal_models.new_clients.examples import DEAD_LETTERS, prepared_examples, read_new_clients

MODEL = build_linear((2,), 2)


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path, SILOS, "mr_mtl", {})


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
    prepare_clients(config)
    with (
        pytest.raises(DataError, match=r"50\.0% of 120 examples cannot be used"),
        prepared_examples(config, tmp_path / "bad.npz"),
    ):
        pass
    # Unusable records are still there when the temporary folder is gone.
    letters = list((tmp_path / "run" / DEAD_LETTERS).glob("*.jsonl"))
    assert sum(len(path.read_text().splitlines()) for path in letters) == 60
