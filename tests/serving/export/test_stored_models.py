import dataclasses
import json

import numpy as np
import pytest

from serving.export.stored_models import read_models, with_clients
from serving.models import CLUSTERS, HYPERNETWORK
from serving.saved_model import layout
from serving.saved_model import layout as manifest
from tff_pdp.errors import ServingError


@pytest.fixture
def models(exporter):
    heads = {
        client: {name: weights[name] for name in exporter.model.head}
        for client, weights in exporter.personal_weights.items()
    }
    return exporter.models(heads)


def own_row(models, value):
    return {name: np.full_like(stack[0], value) for name, stack in models.stacked.items()}


def assert_equal(actual, expected):
    assert list(actual.client_ids) == list(expected.client_ids)
    assert actual.layout == expected.layout
    np.testing.assert_array_equal(actual.rows, expected.rows)
    assert actual.rows.dtype == np.int32
    for attribute in ("shared", "stacked"):
        arrays, right = getattr(actual, attribute), getattr(expected, attribute)
        assert set(arrays) == set(right)
        for name in right:
            np.testing.assert_array_equal(arrays[name], right[name])


def test_an_export_reads_back_as_what_was_written(exporter, models, tmp_path):
    models = dataclasses.replace(models, rows=np.array([2, 1, 2], np.int32), layout=CLUSTERS)
    assert_equal(read_models(exporter.export(tmp_path, models=models), exporter.model), models)


def test_an_export_without_clients_reads_back(exporter, tmp_path):
    models = exporter.models({})
    assert_equal(read_models(exporter.export(tmp_path, models=models), exporter.model), models)


def test_rows_that_weights_are_made_from_read_back_with_the_function(exporter, models, tmp_path):
    def make_weights(shared, own):
        return {**shared, **own}

    models = dataclasses.replace(models, layout=HYPERNETWORK, make_weights=make_weights)
    path = exporter.export(tmp_path, models=models)
    assert_equal(read_models(path, exporter.model, make_weights), models)
    with pytest.raises(ServingError, match="make_weights is needed"):
        read_models(path, exporter.model)
    with pytest.raises(ServingError, match=r"configured now \(KeyError: 'layer_7'\)"):
        read_models(path, exporter.model, lambda shared, own: {"kernel": shared["layer_7"]})


def test_damaged_and_foreign_exports_are_not_read(exporter, models, tmp_path):
    path = exporter.export(tmp_path, models=models)
    details = json.loads((path / layout.MANIFEST_FILE).read_text())
    for changes, message in [
        ({"weights": {"shared": [], "stacked": ["a", "b", "c"]}}, "does not hold models of this package"),
        ({"layout": "other"}, "no layout"),
        ({"weights": {"shared": ["a", "b"], "stacked": ["c", "d"]}}, "Weights of the global model are"),
    ]:
        manifest.write_manifest(path, {**details, **changes})
        with pytest.raises(ServingError, match=message):
            read_models(path, exporter.model)
    vocabulary = path / layout.VOCABULARY_FILE
    vocabulary.write_text("<global>\nalice\n")
    manifest.write_manifest(path, details)
    with pytest.raises(ServingError, match="does not fit the rows"):
        read_models(path, exporter.model)
    vocabulary.write_text("changed")
    with pytest.raises(ServingError, match="SHA-256"):
        read_models(path, exporter.model)


def test_new_clients_get_new_rows(models):
    more = with_clients(models, {"carol": own_row(models, 7), "dan": own_row(models, 8)})
    assert list(more.client_ids) == ["alice", "bob", "é ü", "carol", "dan"]
    np.testing.assert_array_equal(more.rows, [1, 2, 3, 4, 5])
    for name, stack in more.stacked.items():
        np.testing.assert_array_equal(stack[:4], models.stacked[name])
        assert (stack[4] == 7).all()
        assert (stack[5] == 8).all()
    assert models.num_rows == 4


def test_a_known_client_is_replaced_only_when_that_is_said(models):
    with pytest.raises(ServingError, match="'bob' has a personal model already"):
        with_clients(models, {"carol": own_row(models, 7), "bob": own_row(models, 8)})
    replaced = with_clients(models, {"bob": own_row(models, 8)}, replace=True)
    np.testing.assert_array_equal(replaced.rows, models.rows)
    for name, stack in replaced.stacked.items():
        # Nothing is left of the old row.
        assert (stack[2] == 8).all()
        np.testing.assert_array_equal(np.delete(stack, 2, axis=0), np.delete(models.stacked[name], 2, axis=0))


def test_a_row_that_others_own_too_stays_for_them(models):
    models = dataclasses.replace(models, rows=np.array([1, 1, 0], np.int32), layout=CLUSTERS)
    replaced = with_clients(models, {"alice": own_row(models, 7), "é ü": own_row(models, 8)}, replace=True)
    np.testing.assert_array_equal(replaced.rows, [4, 1, 5])
    both = with_clients(models, {"alice": own_row(models, 7), "bob": own_row(models, 8)}, replace=True)
    np.testing.assert_array_equal(both.rows, [4, 1, 0])
    assert all((stack[1] == 8).all() and (stack[4] == 7).all() for stack in both.stacked.values())


def test_in_clusters_a_client_may_take_a_row_there_is(models):
    clusters = dataclasses.replace(models, layout=CLUSTERS)
    np.testing.assert_array_equal(with_clients(clusters, {"carol": 2}).rows, [1, 2, 3, 2])
    with pytest.raises(ServingError, match="cannot have row 4"):
        with_clients(clusters, {"carol": 4})
    with pytest.raises(ServingError, match="in the layout 'clusters' only"):
        with_clients(models, {"carol": 2})


def test_rows_that_do_not_fit_are_refused(models):
    name = sorted(models.stacked)[0]
    row = own_row(models, 1)
    for own, message in [
        ({}, "each client must have"),
        ({**row, "other": row[name]}, "each client must have"),
        ({**row, name: row[name].astype(np.float64)}, "a row needs float32"),
        ({**row, name: row[name][:1]}, "a row needs float32"),
        (own_row(models, np.nan), "'carol' has a value that is not finite"),
    ]:
        with pytest.raises(ServingError, match=message):
            with_clients(models, {"carol": own})
    with pytest.raises(ServingError, match="line break"):
        with_clients(models, {"a\nb": row})
