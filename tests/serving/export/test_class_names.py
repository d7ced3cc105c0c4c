"""Names of classes: in the answers of an export, in its manifest, and read back when clients are added."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from serving.export.expectations import build_expectations, default_references
from serving.export.stored_models import read_models
from serving.saved_model import layout
from serving.saved_model.servable import load_servable
from serving.saved_model.warmup import example
from tff_pdp.errors import ServingError

NAMES = ("lying", "sitting", "süß", "walking")


@pytest.fixture(scope="module")
def named(exporter):
    return dataclasses.replace(exporter.models(), class_names=NAMES)


@pytest.fixture(scope="module")
def version(exporter, named, tmp_path_factory):
    return exporter.export(tmp_path_factory.mktemp("named"), models=named)


def test_answers_name_the_class_with_the_largest_probability(exporter, version):
    ids = ["", *exporter.personal_weights][:2]
    with contextlib.closing(load_servable(version)) as servable:
        answer = servable.predict("", {"client_id": np.array(ids, object), "x": exporter.x[:2]})
        largest = answer["probabilities"].argmax(axis=-1)
        assert [name.decode() for name in answer["class"]] == [NAMES[place] for place in largest]
        serialised = np.array([example("", exporter.x[0]).SerializeToString()], object)
        classes = servable.on_examples("classify", "classify", serialised)["classes"]
    assert [name.decode() for name in classes[0]] == list(NAMES)


def test_the_manifest_has_the_names_and_they_read_back(exporter, version):
    assert json.loads((version / layout.MANIFEST_FILE).read_text())["class_names"] == list(NAMES)
    assert read_models(version, exporter.model).class_names == NAMES


def test_without_names_there_is_no_output_for_them(exporter, export_dir):
    with contextlib.closing(load_servable(export_dir)) as servable:
        assert set(servable.signatures["predict"].outputs) == {"probabilities", "personalized"}
    assert "class_names" not in json.loads((export_dir / layout.MANIFEST_FILE).read_text())


def test_another_name_is_a_wrong_answer(exporter, named, version):
    swapped = dataclasses.replace(named, class_names=NAMES[::-1])
    expected = build_expectations(swapped, exporter.x, default_references(swapped))
    with pytest.raises(ServingError, match="class"):
        exporter.process.verify(version, expected)


def test_where_two_classes_are_as_likely_no_name_is_expected(exporter, named):
    same = {name: np.zeros_like(array) for name, array in exporter.global_weights.items()}
    expected = build_expectations(named, exporter.x, {"": same})
    assert all("class" not in one.outputs for one in expected)


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "c", "b")])
def test_each_class_has_a_name_of_its_own(exporter, named, names, tmp_path):
    with pytest.raises(ServingError, match="names of classes"):
        exporter.export(tmp_path, models=dataclasses.replace(named, class_names=names))
