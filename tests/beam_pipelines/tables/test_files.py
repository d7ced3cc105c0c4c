import gzip

import pyarrow
import pyarrow.parquet
import pytest

from beam_pipelines.tables.files import Lines, lines_of, list_tables, read_batches, read_header, write_table
from tests.beam_pipelines.tables.people import table
from tff_pdp.errors import ConfigError, DataError

# An empty line, a row that is too short, a line end within quotes, and a row that is too long.
CROOKED = 'a,b\n1,x\n\n2\n"3","y\nz"\n4,,5\n6,\n'


def read(path, columns=("a", "b")):
    return pyarrow.Table.from_batches(list(read_batches(path, columns))).to_pydict()


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_rows_keep_their_lines(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(CROOKED.encode()) if name.endswith(".gz") else CROOKED.encode())
    assert read(path) == {"a": ["1", "3", "6"], "b": ["x", "y\nz", None]}
    lines = lines_of(path)
    assert lines == Lines([2, 6, 8], ((4, 1), (7, 3)))
    assert lines.place(1) == "line 6"


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.tsv", "a\tb\n1\t2\n"), ("t.csv", "a;b\n1;2\n"), ("t.csv", "\ufeffa,b\r\n1,2\r\n")],
)
def test_separators_and_line_ends(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    assert read_header(tmp_path / name) == ("a", "b")
    assert read(tmp_path / name) == {"a": ["1"], "b": ["2"]}


def test_parquet_keeps_types_and_has_rows_instead_of_lines(tmp_path):
    path = write_table(pyarrow.table({"a": [1.5, None], "b": [[1, 2], []]}), tmp_path / "new" / "t")
    assert path.name == "t.parquet"
    assert read(path) == {"a": [1.5, None], "b": [[1, 2], []]}
    assert read_header(path) == ("a", "b")
    assert lines_of(path).place(0) == "row 1"


def test_what_is_no_table_is_not_written(tmp_path):
    with pytest.raises(ConfigError, match=r"pandas DataFrame or a pyarrow\.Table"):
        write_table([1, 2], tmp_path / "t")


def test_other_files_of_a_folder_are_left_alone(tmp_path):
    for name in ("b.csv", "a.tsv", ".hidden.csv", "notes.txt"):
        (tmp_path / name).write_text(table())
    assert list_tables(tmp_path) == (tmp_path, ("a.tsv", "b.csv"))
    assert list_tables(tmp_path / "b.csv") == (tmp_path, ("b.csv",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", "empty"),
        ("t.csv", b"a,a\n1,2\n", "'a' occurs more than once"),
        ("t.csv", b"a,b\n\xff,1\n", "cannot be read as a table"),
        ("t.csv.gz", b"no gzip", "cannot be read as a table"),
        ("t.parquet", b"no parquet", "cannot be read as a table"),
    ],
)
def test_damaged_tables_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: .*{message}|{name}: {message}"):
        read_header(tmp_path / name)
        read(tmp_path / name)


def test_a_path_without_tables_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no table; data.input must be a \.csv"):
        list_tables(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        list_tables(tmp_path / "absent")
