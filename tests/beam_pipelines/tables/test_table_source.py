"""Tables through the job: values in the dataset, what is taken from the data, and every row that cannot be used."""

import json

import numpy as np
import pyarrow
import pytest

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.sources.table import Table
from beam_pipelines.tables.files import write_table
from tests.beam_pipelines.conftest import contents, dead_letters
from tests.beam_pipelines.tables.people import HEADER, ROWS, table, write_people
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import Manifest, Tally
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import read_settings
from tff_pdp.testing import check_source

SCHEMA = {
    "height": {"kind": "number"},
    "sport": {"kind": "category", "categories": ["run", "swim"]},
    "steps": {"kind": "integer", "low": 0},
    "activity": {"kind": "class", "classes": ["walk", "sit"]},
}
SETTINGS = {
    "label_column": "activity",
    "min_examples_per_client": 1,
    "max_bad_fraction": 1.0,
    "test_fraction": 0.0,
    "validation_fraction": 0.0,
}


@pytest.fixture
def prepare(tmp_path):
    def run(path, **changes):
        content = {"kind": "table", "input": str(path), **SETTINGS, **changes}
        settings = read_settings(Table, content, "my.yaml", "data")
        raw = settings.build(tmp_path / "raw")
        run_client_dataset_job(raw, settings.job_options(tmp_path / "clients", overwrite=True))
        return ClientDataset.open(tmp_path / "clients", verify=True)

    return run


def rows(dataset, client, split="train"):
    examples = dataset.load(client, split)
    return sorted((*x.tolist(), y) for x, y in zip(examples.x, examples.y.tolist(), strict=True))


# Height, run, swim, steps, and the class: walk is 0.
EXPECTED = [(-3, 1, 0, 30, 1), (0.25, 1, 0, 40, 0), (1.5, 1, 0, 10, 1), (20, 0, 1, 20, 0)]


def test_a_file_for_each_client(prepare, tmp_path):
    dataset = prepare(write_people(tmp_path / "people"), schema=SCHEMA)
    assert dataset.client_ids == ("ann", "bob")
    assert rows(dataset, "ann") == EXPECTED
    manifest = dataset.manifest
    assert (manifest.features.shape, manifest.features.num_classes) == ((4,), 2)
    assert manifest.class_names == ("walk", "sit")
    assert manifest.treated_as_public == ()
    assert manifest.left_out == {}
    assert list(manifest.parameters["columns"]) == ["height", "sport", "steps"]


def test_a_column_of_clients_gives_the_same_examples(prepare, tmp_path):
    # Bob's rows lie in both files.
    header = f"who,{HEADER}"
    first = table(*(f"ann,{row}" for row in ROWS), *(f"bob,{row}" for row in ROWS[:2]), header=header)
    second = table(*(f"bob,{row}" for row in ROWS[2:]), header=header)
    folder = write_people(tmp_path / "tables", first=first, second=second)
    dataset = prepare(folder, client_column="who", schema=SCHEMA)
    assert dataset.client_ids == ("ann", "bob")
    assert rows(dataset, "ann") == rows(dataset, "bob") == EXPECTED


def test_parquet_gives_the_same_examples(prepare, tmp_path):
    columns = {
        "who": ["ann"] * 4,
        "height": [1.5, 20.0, -3.0, 0.25],
        "sport": ["run", "swim", "run", "run"],
        "steps": [10, 20, 30, 40],
        "activity": ["sit", "walk", "sit", "walk"],
    }
    path = write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    assert rows(prepare(path, client_column="who", schema=SCHEMA), "ann") == EXPECTED


def test_what_is_not_declared_is_taken_from_all_clients_and_named(prepare, tmp_path):
    more = table(*ROWS, "1,dive,5,lie")
    dataset = prepare(write_people(tmp_path / "people", ann=table(*ROWS), bob=more))
    assert dataset.manifest.class_names == ("lie", "sit", "walk")
    # Height, three sports in the order of letters, steps, class.
    assert rows(dataset, "ann")[0] == (-3, 0, 1, 0, 30, 1)
    assert dataset.manifest.treated_as_public == (
        "which columns an example has (3)",
        "kinds of 'height', 'sport', 'steps'",
        "categories of 'sport' (3)",
        "classes of 'activity' (3)",
    )


def test_labels_of_numbers_are_ordered_as_numbers(prepare, tmp_path):
    text = table(*(f"{n},{n}" for n in (10, 9, 2)), header="x,y")
    dataset = prepare(write_people(tmp_path / "people", ann=text), label_column="y")
    assert dataset.manifest.class_names == ("2", "9", "10")
    assert rows(dataset, "ann") == [(2, 0), (9, 1), (10, 2)]


def test_a_regression_has_the_numbers_themselves(prepare, tmp_path):
    folder = write_people(tmp_path / "people", ann=table("1,0.5", "2,-7", header="x,y"))
    dataset = prepare(folder, label_column="y", num_classes=0)
    assert (dataset.manifest.features.num_classes, dataset.manifest.class_names) == (0, None)
    assert rows(dataset, "ann") == [(1, 0.5), (2, -7)]


def test_a_column_of_splits_decides(prepare, tmp_path):
    text = table("1,a,train", "2,a,TEST", "3,b,valid", "4,b,never", header="x,y,part")
    dataset = prepare(write_people(tmp_path / "people", ann=text), label_column="y", split_column="part")
    found = {split: rows(dataset, "ann", split) for split in ("train", "validation", "test")}
    assert found == {"train": [(1, 0)], "validation": [(3, 1)], "test": [(2, 0)]}
    (letter,) = dead_letters(dataset.path / "dead_letters")
    assert letter["raw"] == json.dumps("line 5, column 'part': 'never'")


def test_sequences_are_padded(prepare, tmp_path):
    text = table("1 2 3,a", "4,b", header="words,y")
    dataset = prepare(
        write_people(tmp_path / "people", ann=text), label_column="y", schema={"words": {"kind": "tokens"}}
    )
    assert rows(dataset, "ann") == [(1, 2, 3, 0), (4, 0, 0, 1)]
    assert "longest sequence of 'words' (3)" in dataset.manifest.treated_as_public
    assert "largest token id of 'words' (4)" in dataset.manifest.treated_as_public


def test_every_row_that_cannot_be_used_is_named_with_line_column_and_allowed_values(prepare, tmp_path):
    bad = table(
        ROWS[0], "tall,run,1,sit", "1,walk,2,sit", "", "1,run,-1,sit", "1,run,1,jump", "1,run,,sit", "1,run", ROWS[1]
    )
    dataset = prepare(write_people(tmp_path / "people", ann=bad), schema=SCHEMA)
    assert rows(dataset, "ann") == [EXPECTED[2], EXPECTED[3]]
    found = {json.loads(letter["raw"]): letter for letter in dead_letters(dataset.path / "dead_letters")}
    allowed = {place: (letter["reason"], letter["allowed"]) for place, letter in found.items()}
    assert allowed == {
        "line 3, column 'height': 'tall'": ("value_of_wrong_type", "a number"),
        "line 4, column 'sport': 'walk'": ("value_outside_of_schema", "one of run, swim"),
        "line 6, column 'steps': '-1'": ("value_outside_of_schema", "a whole number of at least 0"),
        "line 7, column 'activity': 'jump'": (
            "value_outside_of_schema",
            "one of walk, sit (the classes of data.schema or data.num_classes)",
        ),
        "line 8, column 'steps': ''": ("value_missing", "a whole number of at least 0"),
        "line 9: 2 values": ("row_of_another_length", "4 values, as in the header"),
    }
    assert {letter["client"] for letter in found.values()} == {"ann"}
    assert dataset.manifest.read == Tally(1, 8)


def test_too_many_bad_rows_stop_the_job_with_the_first_of_each_kind(prepare, tmp_path):
    folder = write_people(tmp_path / "people", ann=table(*ROWS, "tall,run,1,sit"))
    with pytest.raises(DataError) as error:
        prepare(folder, schema=SCHEMA, max_bad_fraction=0.1)
    assert "20.0% of 5 examples" in str(error.value)
    assert "client 'ann', example 4 of ann.csv: found \"line 6, column 'height': 'tall'\"; allowed: a number" in str(
        error.value
    )


def test_clients_that_are_left_out_are_named_everywhere(prepare, tmp_path, capsys):
    folder = write_people(
        tmp_path / "people",
        ann=table(*ROWS),
        bob=table(ROWS[0]),
        cid=table(),
        dot=table("1,run,sit", header="height,sport,activity"),
    )
    dataset = prepare(folder, schema=SCHEMA, min_examples_per_client=2)
    assert dataset.client_ids == ("ann",)
    assert dataset.manifest.left_out == {
        "client_below_min_examples": ("bob", "cid"),
        "file_without_needed_columns": ("dot",),
    }
    assert dataset.manifest.dropped["client_below_min_examples"] == Tally(2, 1)
    letters = {letter["client"]: letter for letter in dead_letters(dataset.path / "dead_letters")}
    assert set(letters) == {"bob", "cid", "dot"}
    assert letters["cid"]["allowed"] == "at least 2 (data.min_examples_per_client)"
    assert "no column 'steps'" in letters["dot"]["raw"]


def test_rows_without_a_client_are_dead_letters(prepare, tmp_path):
    text = table(*(f"ann,{row}" for row in ROWS), f",{ROWS[0]}", "bob,1", header=f"who,{HEADER}")
    path = write_people(tmp_path, all=text) / "all.csv"
    dataset = prepare(path, client_column="who", schema=SCHEMA)
    assert rows(dataset, "ann") == EXPECTED
    raws = [json.loads(letter["raw"]) for letter in dead_letters(dataset.path / "dead_letters")]
    assert set(raws) == {"line 6, column 'who': ''", "line 7: 2 values", "0 valid examples"}


def test_a_schema_may_be_a_file(prepare, tmp_path):
    (tmp_path / "schema.yaml").write_text(json.dumps(SCHEMA))
    dataset = prepare(write_people(tmp_path / "people"), schema=str(tmp_path / "schema.yaml"))
    assert (rows(dataset, "bob"), dataset.manifest.treated_as_public) == (EXPECTED, ())


def test_bytes_do_not_depend_on_the_number_of_tasks_or_on_the_run(prepare, tmp_path):
    folder = write_people(tmp_path / "people")
    first = contents(prepare(folder, schema=SCHEMA).path)
    assert contents(prepare(folder, schema=SCHEMA).path) == first


def test_it_keeps_the_contract_of_raw_data(tmp_path):
    path = str(write_people(tmp_path / "people"))
    dataset = check_source(Table, {"input": path, **SETTINGS}, tmp_path / "checked", num_clients=2)
    assert dataset.manifest.class_names == ("sit", "walk")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_column": "activty"}, r"data.label_column: 'activty' is not a column .* did you mean activity\?"),
        ({"feature_columns": ["hight"]}, r"data.feature_columns\[0\]: 'hight' .* did you mean height\?"),
        ({"feature_columns": ["activity"]}, "'activity' is the column of labels"),
        ({"schema": {"weight": {"kind": "number"}}}, "data.schema.weight: 'weight' is not a column"),
        ({"schema": {"height": {"kind": "class"}}}, "data.schema.height: kind class is for labels"),
        ({"schema": SCHEMA, "num_classes": 3}, "data.num_classes is 3, but data.schema.activity has 2 classes"),
        ({"input_shape": [2, 3]}, r"data.input_shape is \[2, 3\], which has 6 values; the columns give 4"),
    ],
)
def test_settings_that_do_not_suit_the_tables(prepare, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        prepare(write_people(tmp_path / "people"), **changes)


def test_one_table_needs_a_column_of_clients(prepare, tmp_path):
    with pytest.raises(ConfigError, match="name the column of clients"):
        prepare(write_people(tmp_path / "people") / "ann.csv")


def test_free_text_is_not_taken_for_categories(prepare, tmp_path):
    text = table(*(f"note {number},{number % 2}" for number in range(200)), header="remark,y")
    with pytest.raises(DataError, match="'remark' has more than 100 different values, such as 'note 0'"):
        prepare(write_people(tmp_path / "people", ann=text), label_column="y")


def test_a_manifest_of_an_earlier_release_has_no_class_names(prepare, tmp_path):
    dataset = prepare(write_people(tmp_path / "people"), schema=SCHEMA)
    path = dataset.path / "manifest.json"
    fields = json.loads(path.read_text())
    for name in ("class_names", "left_out", "treated_as_public"):
        del fields[name]
    path.write_text(json.dumps(fields))
    # As in releases without checksums.
    (dataset.path / "_SUCCESS").write_bytes(b"")
    old = Manifest.load(dataset.path)
    assert (old.class_names, old.left_out, old.treated_as_public) == (None, {}, ())
    np.testing.assert_array_equal(old.features.shape, (4,))
