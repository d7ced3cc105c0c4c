"""Messages of a job that stops, or leaves clients out: whose, the value found, the values allowed."""

import json

import numpy as np
import pytest

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.sources.silo_files import SiloArrays, SiloFiles, write_silo_arrays
from tests.beam_pipelines.conftest import dead_letters
from tff_pdp.errors import DataError
from tff_pdp.settings import read_settings

X = np.ones((4, 3), np.float32)


@pytest.fixture
def prepare(tmp_path):
    def run(*silos, **changes):
        write_silo_arrays(tmp_path / "a.npz", [SiloArrays(*silo) for silo in silos])
        content = {"kind": "silo_files", "input": str(tmp_path / "a.npz"), "input_shape": [3], "num_classes": 2}
        settings = read_settings(SiloFiles, {**content, "min_examples_per_client": 2, **changes}, "my.yaml", "data")
        options = settings.job_options(tmp_path / "clients", overwrite=True)
        return run_client_dataset_job(settings.build(tmp_path / "raw"), options)

    return run


GOOD = ("good", X, np.array([0, 1, 0, 1]))
STATED = "a whole number from 0 to 1 (data.num_classes is 2)"


@pytest.mark.parametrize(
    ("silo", "message"),
    [
        (
            ("ann", X, np.array(["walk", "sit", "walk", "sit"])),
            f"label_not_an_integer: client 'ann', example 0 of a.npz: found \"walk\"; allowed: {STATED}; number the "
            "names of classes, or read a table with data.kind table, which keeps names",
        ),
        (
            ("ann", X, np.array([1, 2, 1, 2])),
            f"label_out_of_range: client 'ann', example 1 of a.npz: found 2; allowed: {STATED}; where labels begin at "
            "1, subtract 1",
        ),
        (
            ("ann", X[:, :2], np.array([0, 1, 0, 1])),
            "wrong_feature_count: client 'ann', example 0 of a.npz: found [1.0, 1.0]; allowed: 3 values (the product "
            "of data.input_shape); this example has 2",
        ),
        (
            ("ann", X * np.inf, np.array([0, 1, 0, 1])),
            "feature_not_finite: client 'ann', example 0 of a.npz: found [Infinity, Infinity, Infinity]; allowed: "
            "finite numbers within the range of float32",
        ),
    ],
    ids=["text", "from 1", "feature count", "not finite"],
)
def test_the_error_shows_whose_value_was_found_and_what_is_allowed(prepare, silo, message):
    with pytest.raises(DataError) as error:
        prepare(GOOD, silo)
    assert message in str(error.value)
    assert "dead letters are kept in" in str(error.value)


def test_clients_of_one_example_and_of_none_are_named(prepare):
    summary = prepare(GOOD, ("one", X[:1], np.array([0])), ("none", X[:0], np.zeros(0, int)))
    assert summary.manifest.left_out == {"client_below_min_examples": ("none", "one")}
    lines = dict(line.rsplit("  ", 1) for line in summary.table().splitlines())
    shown = {key.strip(): value.strip() for key, value in lines.items()}
    assert shown["dropped examples (client_below_min_examples)"] == "1"
    assert shown["left-out clients (client_below_min_examples)"] == "2: none, one"
    letters = {letter["client"]: letter for letter in dead_letters(summary.output / "dead_letters")}
    assert {client: (json.loads(letter["raw"]), letter["num_examples"]) for client, letter in letters.items()} == {
        "one": ("1 valid examples", 1),
        "none": ("0 valid examples", 0),
    }


def test_a_client_without_training_examples_is_named(prepare):
    # All examples are equal, so the hash of the split puts all into one split: here the one for test.
    same = [(f"client {number}", X * number, np.zeros(4, int)) for number in range(20)]
    summary = prepare(GOOD, *same, test_fraction=0.5, validation_fraction=0.0)
    left_out = summary.manifest.left_out["client_without_train_examples"]
    assert 0 < len(left_out) < 20
    assert set(left_out).isdisjoint(summary.manifest.clients)


def test_of_many_clients_the_first_names_are_printed_and_all_are_kept(prepare):
    small = [(f"client {number:02d}", X[:1], np.array([0])) for number in range(13)]
    summary = prepare(GOOD, *small)
    assert len(summary.manifest.left_out["client_below_min_examples"]) == 13
    assert "13: client 00, client 01, " in summary.table()
    assert "client 09 and 3 more" in summary.table()
    assert len(summary.as_dict()["left-out clients (client_below_min_examples)"]) == 13
