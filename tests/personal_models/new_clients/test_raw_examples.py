"""Raw data of new clients are prepared as the data of training were: same columns, same numbers of classes."""

import numpy as np
import pytest

from beam_pipelines.sources.silo_files import SiloArrays, write_silo_arrays
from tests.beam_pipelines.tables.people import ROWS, table, write_people
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import DataError
from tff_pdp.experiment.config import experiment_of
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.personal_models.new_clients.examples import prepared_examples


def experiment(tmp_path, **data):
    content = {
        "title": "t",
        "output": str(tmp_path / "run"),
        "data": {"min_examples_per_client": 3, "max_bad_fraction": 0.9, **data},
        "model": {"kind": "linear"},
        "privacy": {"kind": "none", "unit": "silo", "batch_size": 2},
        "training": {"rounds": 1},
        "algorithms": {"fed_avg": {}},
        "export": {"algorithm": "fed_avg", "model_name": "m"},
    }
    return experiment_of(content, "my.yaml")


@pytest.fixture
def tables(tmp_path):
    """An experiment on three sports and three activities, none of which the schema declares."""
    folder = write_people(tmp_path / "people", ann=table(*ROWS, "1,dive,5,lie"), bob=table(*ROWS))
    config = experiment(tmp_path, kind="table", input=str(folder), label_column="activity")
    prepare_clients(config)
    return config


def test_tables_have_the_columns_and_classes_of_training(tables, tmp_path, capsys):
    # Nobody of them dives or lies, and one has no row at all.
    own = {"eve": table(*ROWS), "fay": table(*ROWS, "9,dance,1,sit")}
    folder = write_people(tmp_path / "new", **own, gus=table())
    with prepared_examples(tables, folder) as path:
        dataset = ClientDataset.open(path)
        assert dataset.client_ids == ("eve", "fay")
        assert "left out (client_below_min_examples): gus" in capsys.readouterr().err
        assert dataset.manifest.class_names == ("lie", "sit", "walk")
        found = [dataset.load("eve", split) for split in ("train", "validation", "test")]
        x, y = (np.concatenate([getattr(part, name) for part in found]) for name in "xy")
        # Height, dive, run, swim, steps.
        rows = sorted((*row.tolist(), label) for row, label in zip(x, y.tolist(), strict=True))
        assert rows == [(-3, 0, 1, 0, 30, 1), (0.25, 0, 1, 0, 40, 2), (1.5, 0, 1, 0, 10, 1), (20, 0, 0, 1, 20, 2)]
        # To dance is no sport of training.
        assert dataset.manifest.dropped["value_outside_of_schema"].examples == 1
    assert not path.exists()


def test_what_is_ready_stays_as_it_is(tables, tmp_path):
    np.savez(tmp_path / "one.npz", x=np.ones((2, 5)), y=np.zeros(2))
    for path in (tables.clients_folder, tmp_path / "one.npz"):
        with prepared_examples(tables, path) as given:
            assert given == path


def test_arrays_of_several_clients_are_prepared(tmp_path):
    silos = [SiloArrays(name, np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])) for name in ("a", "b")]
    write_silo_arrays(tmp_path / "silos.npz", silos)
    how = {"kind": "silo_files", "input_shape": [2], "num_classes": 2}
    config = experiment(tmp_path, input=str(tmp_path / "silos.npz"), **how)
    prepare_clients(config)
    with prepared_examples(config, tmp_path / "silos.npz") as path:
        assert ClientDataset.open(path).client_ids == ("a", "b")


def test_other_files_are_refused_by_the_kind_of_raw_data(tables, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("nothing")
    with pytest.raises(DataError, match="no table"), prepared_examples(tables, tmp_path / "notes"):
        raise AssertionError("nothing can be prepared")
