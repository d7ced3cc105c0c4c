import dataclasses
import json

import numpy as np
import pytest

from serving.export.per_client import export_per_client, only_client
from serving.saved_model import layout
from serving.saved_model.servable import load_servable
from tff_pdp.errors import ServingError


@pytest.fixture
def two(exporter):
    return exporter.models({name: exporter.personal_weights[name] for name in ("alice", "bob")})


@pytest.fixture
def export(exporter, two, tmp_path):
    def run(**changes):
        arguments = {
            "models": two,
            "model_name": "toy",
            "privacy_report": {"claim": "none"},
            "model_card": {"purpose": "test"},
            "process": exporter.process,
        }
        return export_per_client(tmp_path, **{**arguments, **changes})

    return run


def test_every_client_gets_an_export_of_its_own_and_of_nobody_elses(exporter, export, tmp_path):
    exported = export()
    assert exported == {name: tmp_path / f"toy.{name}" / "1" for name in ("alice", "bob")}
    ids = np.array(["bob", "alice", ""], object)
    answer = load_servable(exported["bob"]).predict("", {"client_id": ids, "x": exporter.x[:3]})
    np.testing.assert_allclose(
        answer["probabilities"], exporter.expected(["bob", "", ""], exporter.x[:3]), atol=exporter.rounding()
    )
    np.testing.assert_array_equal(answer["personalized"], [True, False, False])
    other = exporter.personal_weights["alice"]["dense_0/kernel"].tobytes()
    for path in exported["bob"].rglob("*"):
        if path.is_file():
            assert b"alice" not in path.read_bytes(), path
            assert other not in path.read_bytes(), path
    assert (exported["bob"] / layout.VOCABULARY_FILE).read_text() == "<global>\nbob\n"
    assert json.loads((exported["bob"] / layout.MANIFEST_FILE).read_text())["model_name"] == "toy.bob"


def test_only_what_is_missing_damaged_or_changed_is_exported_again(exporter, export, two, tmp_path):
    first = export()
    before = (first["alice"] / layout.MANIFEST_FILE).read_bytes()
    (first["bob"] / "variables" / "variables.index").write_bytes(b"damaged")
    assert {name: path.name for name, path in export().items()} == {"alice": "1", "bob": "2"}
    changed = {name: np.concatenate([stack[:2], stack[2:] + 1]) for name, stack in two.stacked.items()}
    models = dataclasses.replace(two, stacked=changed)
    again = export(models=models)
    assert {name: path.name for name, path in again.items()} == {"alice": "1", "bob": "3"}
    assert (again["alice"] / layout.MANIFEST_FILE).read_bytes() == before


def test_a_model_that_makes_something_else_of_the_same_arrays_is_the_next_version(exporter, export, two):
    alice = only_client(two, 0)
    export(models=alice)
    predict = exporter.model.predict
    other = dataclasses.replace(exporter.model, predict=lambda weights, x: 2.0 * predict(weights, x))
    assert export(models=dataclasses.replace(alice, model=other))["alice"].name == "2"


def test_answers_must_be_those_of_the_references(exporter, export, two):
    with pytest.raises(ServingError, match="differently from the model"):
        export(models=only_client(two, 1), references={"bob": exporter.personal_weights["alice"]})


def test_many_clients_are_refused_with_what_they_cost(exporter, export):
    models = exporter.models()
    many = dataclasses.replace(models, client_ids=[str(number) for number in range(201)], rows=np.zeros(201, np.int32))
    with pytest.raises(ServingError, match=r"201 clients would take about 7 minutes, 20 MB for graphs, and 2\.0 GB"):
        export(models=many)


def test_ids_that_cannot_be_part_of_a_name_are_refused_before_anything_is_written(exporter, export, tmp_path):
    with pytest.raises(ServingError, match=r"'toy\.é ü' cannot be served"):
        export(models=exporter.models())
    assert not list(tmp_path.iterdir())
