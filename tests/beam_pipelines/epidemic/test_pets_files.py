"""Tables are written and read in every format, whatever chunks they come in, and never look complete by halves."""

import gzip

import numpy as np
import pyarrow as pa
import pytest

from beam_pipelines.contact_graph.input_tables import read_table
from beam_pipelines.contact_graph.tables import FORMATS, read_observed_days, write_about
from beam_pipelines.epidemic.table_writer import TableFormat, TableWriter
from tff_pdp.errors import DataError

PIDS = np.arange(10) * 10**12
REGIONS = ["a", "b"] * 5
PERSON = {
    "pid": PIDS,
    "hid": PIDS,
    "person_number": np.ones(10, np.int64),
    "age": np.arange(10),
    "sex": np.ones(10, np.int64),
    "region": pa.array(REGIONS).dictionary_encode(),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows_per_file", [None, 4])
def test_what_is_written_is_read(tmp_path, kind, rows_per_file):
    write_people(tmp_path, [10], TableFormat(kind, rows_per_file))
    blocks = list(read_table(tmp_path, "person", ["region", "pid"]))
    pids = np.concatenate([rows["pid"] for rows in blocks])
    assert (pids.dtype, pids.tolist()) == (np.int64, PIDS.tolist())
    assert [region for rows in blocks for region in rows["region"].tolist()] == REGIONS
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    parts = [f"person/part-0000{number}.{kind}" for number in range(3)]
    assert names == (parts if rows_per_file else [f"person.{kind}"])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows_per_file", [None, 4, 5])
def test_files_do_not_depend_on_chunks(tmp_path, kind, rows_per_file):
    contents = []
    for name, chunks in (("whole", [10]), ("parts", [3, 0, 1, 5, 1])):
        write_people(tmp_path / name, chunks, TableFormat(kind, rows_per_file))
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append([path.read_bytes() for path in files])
    assert contents[0] == contents[1]
    assert len(contents[0]) == {None: 1, 4: 3, 5: 2}[rows_per_file]


def test_csv_is_plain(tmp_path):
    write_people(tmp_path, [1], TableFormat("csv.gz"))
    text = gzip.decompress((tmp_path / "person.csv.gz").read_bytes()).decode()
    assert text.replace('"', "") == "pid,hid,person_number,age,sex,region\n0,0,1,0,1,a\n"


@pytest.mark.parametrize("rows_per_file", [None, 2])
def test_a_table_without_rows_has_columns(tmp_path, rows_per_file):
    write_people(tmp_path, [], TableFormat(rows_per_file=rows_per_file))
    assert [pid for rows in read_table(tmp_path, "person", ["pid", "region"]) for pid in rows["pid"]] == []


@pytest.mark.parametrize("rows_per_file", [None, 2])
def test_a_failure_leaves_nothing_new(tmp_path, rows_per_file):
    write_people(tmp_path, [10], TableFormat("csv"))
    before = (tmp_path / "person.csv").read_bytes()
    with (
        pytest.raises(ZeroDivisionError),
        TableWriter(tmp_path, "person", TableFormat(rows_per_file=rows_per_file), overwrite=True) as writer,
    ):
        writer.write(PERSON)
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["person.csv"]
    assert (tmp_path / "person.csv").read_bytes() == before


def test_a_table_is_replaced_only_on_demand_and_then_in_every_format(tmp_path):
    write_people(tmp_path, [10], TableFormat("csv", 4))
    with pytest.raises(DataError, match="person: exists already"):
        TableWriter(tmp_path, "person")
    write_people(tmp_path, [3], TableFormat(), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["person.parquet"]


def test_a_foreign_csv_may_have_an_index_and_other_columns(tmp_path):
    (tmp_path / "person.csv").write_text(",pid,hid,extra\n0,7,1,x\n1,8,1,y\n")
    (rows,) = read_table(tmp_path, "person", ["hid", "pid"])
    assert {name: values.tolist() for name, values in rows.items()} == {"hid": [1, 1], "pid": [7, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pid,hid\n1,2\nx,3\n", r"person\.csv: .*'x'"),
        ("pid,hid\n1,2\n,3\n", "person\\.csv: .*row_with_missing_or_wrong_value: 'None'"),
        ("hid\n2\n", r"person\.csv: .*pid"),
        ("", r"person\.csv: .*"),
    ],
)
def test_bad_tables_are_named(tmp_path, content, message):
    (tmp_path / "person.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_table(tmp_path, "person", ["pid"]))


def test_missing_and_ambiguous_tables_are_errors(tmp_path):
    with pytest.raises(DataError, match="no table person"):
        list(read_table(tmp_path, "person", ["pid"]))
    write_people(tmp_path, [1], TableFormat())
    (tmp_path / "person.csv").write_text("pid\n1\n")
    with pytest.raises(DataError, match=r"person\.csv is the same table"):
        list(read_table(tmp_path, "person", ["pid"]))


def test_observed_days(tmp_path):
    assert read_observed_days(tmp_path) == 1
    write_about(tmp_path, {"observed_days": 5})
    assert read_observed_days(tmp_path) == 5
    for content in ("{", "[]", '{"observed_days": 0}', '{"observed_days": true}', '{"observed_days": 1.5}'):
        (tmp_path / "about.json").write_text(content)
        with pytest.raises(DataError, match=r"about\.json"):
            read_observed_days(tmp_path)


def write_people(folder, chunks, table_format, overwrite=False):
    with TableWriter(folder, "person", table_format, overwrite) as writer:
        start = 0
        for rows in chunks:
            writer.write({name: column[start : start + rows] for name, column in PERSON.items()})
            start += rows
        assert writer.num_rows == sum(chunks)
