"""Tables in every form give the same rows, wherever files are cut; tables that are not there are missed at once."""

import gzip
import itertools

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from beam_pipelines.contact_graph import input_tables
from beam_pipelines.contact_graph.input_tables import chunks_of, find_table, read_chunk
from tests.beam_pipelines.contact_graph.graph_support import (
    contents,
    job_of,
    letters_of,
    options_of,
    run_in_memory,
    small_town,
)
from tff_pdp.errors import DataError


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    found = written(small_town().write(folder / "input"), folder)
    assert len(found) == 4
    return found


def as_parquet(path):
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(path), path.with_suffix(".parquet"), row_group_size=7)
    path.unlink()


def as_gzip(path):
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def as_folder(path):
    header, *lines = path.read_text().splitlines()
    path.unlink()
    folder = path.with_suffix("")
    folder.mkdir()
    for part in range(3):
        (folder / f"part-{part}.csv").write_text("\n".join([header, *lines[part::3], ""]))
    as_gzip(folder / "part-1.csv")
    if lines:
        as_parquet(folder / "part-2.csv")
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.csv.crc").write_bytes(b"crc")


def with_index(path, name=""):
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{name},{header}", *(f"{number},{line}" for number, line in enumerate(lines)), ""]))


def with_other_names(path):
    header, rest = path.read_text().split("\n", 1)
    header = header.replace("activity1,activity2", "activity_type1,activity_type2")
    if path.stem == "target":
        header = header.replace("infected", "value")
    path.write_text(f"{header}\n{rest}")
    with_index(path)


def with_other_order(path):
    table = pyarrow.csv.read_csv(path)
    table = table.select(table.column_names[::-1]).add_column(0, "remark", [["none"] * len(table)])
    pyarrow.csv.write_csv(table, path)


def with_spaces_signs_and_decimals(path):
    # Only one row has text for a number, so that all values are looked at one by one.
    header, *lines = path.read_text().splitlines()
    numbers = {"hid", "age", "duration", "day", "pid1"} & set(header.split(","))
    places = [header.split(",").index(name) for name in numbers]
    rows = [line.split(",") for line in lines]
    for place, row in itertools.product(places, rows):
        row[place] = f" +{row[place]}.0 "
    path.write_text("\n".join([header, *map(",".join, rows), ""]))


def edited(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


FORMS = {
    "parquet": as_parquet,
    "gzip": as_gzip,
    "folders": as_folder,
    "unnamed index": with_index,
    "numbered unnamed index": lambda path: with_index(path, "Unnamed: 0"),
    "other names": with_other_names,
    "other order": with_other_order,
    "spaces, signs and decimals": with_spaces_signs_and_decimals,
    "Windows line ends": edited(lambda text: text.replace(b"\n", b"\r\n")),
    "byte order mark": edited(lambda text: b"\xef\xbb\xbf" + text),
    "no last line end": edited(lambda text: text[:-1]),
    "empty lines": edited(lambda text: text.replace(b"\n", b"\n\n")),
    "quotes": edited(lambda text: text.replace(b"east", b'"east"').replace(b"pid,", b'"pid",')),
}


@pytest.mark.parametrize("change", FORMS.values(), ids=FORMS.keys())
def test_every_form_gives_the_same_bytes(tmp_path, monkeypatch, expected, change):
    # A few lines at a time, where `expected` is of whole files.
    monkeypatch.setattr(input_tables, "_CHUNK_BYTES", 50)
    source = small_town().write(tmp_path / "input")
    for path in sorted(source.iterdir()):
        change(path)
    assert written(source, tmp_path) == expected
    assert not letters_of(tmp_path / "staging")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_no_cut_loses_or_doubles_a_row(tmp_path, monkeypatch, line_end):
    lines = ["pid,infected", *(f"{10 ** (number % 5)},{number % 2}" for number in range(6))]
    path = tmp_path / "target.csv"
    for text in (line_end.join([*lines, ""]), line_end.join(lines), line_end.join([*lines, "", ""])):
        path.write_bytes(text.encode())
        for chunk_bytes in range(1, len(text) + 2):
            monkeypatch.setattr(input_tables, "_CHUNK_BYTES", chunk_bytes)
            found = [row for chunk in chunks_of("target", [path]) for row in rows_in(chunk, ("pid", "infected"))]
            assert found == [tuple(map(int, line.split(","))) for line in lines[1:]], chunk_bytes


def test_compressed_text_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(input_tables, "_CHUNK_BYTES", 10)
    path = tmp_path / "target.csv.gz"
    path.write_bytes(gzip.compress(b"pid,infected\n" + b"".join(b"%d,1\n" % pid for pid in range(100))))
    (chunk,) = chunks_of("target", [path])
    parts = list(read_chunk(chunk, ("pid",)))
    assert len(parts) > 10
    assert np.concatenate([part.columns["pid"] for part in parts]).tolist() == list(range(100))


@pytest.mark.parametrize("table", ["household", "activity_location_assignment", "target"])
def test_some_tables_may_be_missing(tmp_path, table):
    source = small_town().write(tmp_path / "input")
    (source / f"{table}.csv").unlink()
    assert written(source, tmp_path)


def test_nobody_met_and_nobody_fell_ill(tmp_path):
    source = small_town().write(tmp_path / "input")
    for table in ("population_network", "disease_outcome_training"):
        header = (source / f"{table}.csv").read_text().split("\n")[0]
        (source / f"{table}.csv").write_text(header + "\n")
    assert written(source, tmp_path)


def test_a_region_may_have_the_name_of_nothing(tmp_path):
    path = tmp_path / "person.csv"
    path.write_text("pid,region\n1,NA\n2,null\n3,\n4,nan\n")
    (rows,) = (part for chunk in chunks_of("person", [path]) for part in read_chunk(chunk, ("pid", "region")))
    assert rows.columns["region"].tolist() == ["NA", "null", "nan"]
    assert [(letter.reason, letter.raw) for letter in rows.letters] == [("row_with_missing_or_wrong_value", "3,None")]


def test_a_bad_number_leaves_the_others_as_they_are(tmp_path):
    path = tmp_path / "target.csv"
    good = [2**63 - 1, -(2**63), 2**53 + 1, 0, -7]
    bad = [2**63, -(2**63) - 1, 10**19, 10**30, "7.5", "1e3", "0x10", "1_000", "+-1", "--1", ".", "-", "٣"]
    path.write_text("pid,infected\n" + "".join(f"{pid},1\n" for pid in [*bad, *good, "007", "+12", "3.", "4.00"]))
    (rows,) = (part for chunk in chunks_of("target", [path]) for part in read_chunk(chunk, ("pid", "infected")))
    assert rows.columns["pid"].tolist() == [*good, 7, 12, 3, 4]
    assert rows.columns["pid"].dtype == np.int64 and rows.columns["infected"].dtype == np.int8
    assert [letter.raw for letter in rows.letters] == [f"{pid},1" for pid in bad]


def test_a_file_that_was_written_anew_is_looked_at_anew(tmp_path):
    path = tmp_path / "target.csv"
    path.write_text("pid,infected\n7,1\n")
    assert rows_in_target(tmp_path) == [(7, 1)]
    path.unlink()
    (tmp_path / "unrelated").touch()
    path.write_text("infected,pid\n1,7\n")
    assert rows_in_target(tmp_path) == [(7, 1)]


HEADER = "pid1,pid2,lid,start_time,duration,activity1,activity2"
MISSING = {
    "table": ("population_network", None, "no table population_network in it, as .parquet, .csv"),
    "column": ("person", "pid,hid,sex,region", r"person\.csv: no column age in it; it has pid, hid, sex, region"),
    "silo column": ("person", "pid,hid,age,sex", r"person\.csv: no column region"),
    "last column": ("population_network", HEADER.replace(",activity2", ""), "no column activity2"),
    # In the place of a missing column is another one, which must not be taken for it.
    "column between": (
        "population_network",
        "pid1,pid2,lid,layer,start_time,duration,activity_type1,activity_type2",
        "no column activity1",
    ),
    "all of target": ("target", "pid", "no column infected"),
    "nothing": ("target", "", r"target\.csv: cannot be read as table target: Empty CSV file"),
}


@pytest.mark.parametrize(("table", "header", "message"), MISSING.values(), ids=MISSING.keys())
def test_missing_table_or_column(tmp_path, table, header, message):
    source = small_town().write(tmp_path / "input")
    (source / f"{table}.csv").unlink()
    if header is not None:
        (source / f"{table}.csv").write_text(header and f"{header}\n")
    check_error(source, tmp_path, message)


def test_table_in_two_forms(tmp_path):
    source = small_town().write(tmp_path / "input")
    (source / "person.parquet").touch()
    check_error(source, tmp_path, r"person\.parquet: person\.csv is the same table; remove one")


def test_no_folder(tmp_path):
    check_error(tmp_path / "nowhere", tmp_path, "nowhere: no such folder")


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"silo_by": "household.hh_size"}, "household"),
        ({"silo_by": "residence_grid.0.5"}, "residence_locations"),
        (
            {"degree_bound": {"kind": "public_groups", "group_column": "household.hid", "max_group_size": 9}},
            "household",
        ),
    ],
)
def test_tables_that_options_need(tmp_path, changes, missing):
    source = small_town().write(tmp_path / "input")
    (source / "household.csv").unlink()
    check_error(source, tmp_path, f"no table {missing}", **changes)


def test_truncated_parquet_is_found_at_once(tmp_path):
    source = small_town().write(tmp_path / "input")
    as_parquet(source / "population_network.csv")
    path = source / "population_network.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    check_error(source, tmp_path, r"population_network\.parquet: cannot be read as table population_network")


DAMAGED = {
    "parquet": (as_parquet, lambda content: content[:200] + bytes(200) + content[400:], "parquet"),
    "cut gzip": (as_gzip, lambda content: content[:-40], r"csv\.gz"),
    "damaged gzip": (as_gzip, lambda content: content[:150] + b"\xff" * 20 + content[170:], r"csv\.gz"),
    "Latin-1": (lambda path: None, lambda content: content.replace(b"I\n", b"\xe4\n"), "csv"),
}


@pytest.mark.parametrize(("change", "damage", "suffix"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_file(tmp_path, change, damage, suffix):
    source = small_town().write(tmp_path / "input")
    change(source / "disease_outcome_training.csv")
    (path,) = source.glob("disease_outcome_training.*")
    path.write_bytes(damage(path.read_bytes()))
    job = job_of(options_of(source, tmp_path))
    with pytest.raises(DataError, match=rf"disease_outcome_training\.{suffix}: cannot be read as table disease"):
        run_in_memory(job.stages, tmp_path / "staging")


@pytest.mark.parametrize("table", ["person", "disease_outcome_training", "population_network"])
def test_lines_that_end_as_on_old_computers_are_refused_by_name(tmp_path, table):
    source = small_town().write(tmp_path / "input")
    path = source / f"{table}.csv"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(DataError, match=rf"{table}\.csv: lines end with a carriage return alone"):
        job_of(options_of(source, tmp_path))


@pytest.mark.parametrize("name", ["target.csv", "person/part-3.csv"])
def test_a_link_to_nothing_is_not_passed_over(tmp_path, name):
    source = small_town().write(tmp_path / "input")
    if "/" in name:
        as_folder(source / "person.csv")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "annex")
    with pytest.raises(DataError, match=rf"{name}: a link to .*annex, which does not exist"):
        job_of(options_of(source, tmp_path))


def test_parquet_column_of_another_type(tmp_path):
    source = small_town().write(tmp_path / "input")
    table = pyarrow.csv.read_csv(source / "person.csv")
    (source / "person.csv").unlink()
    ages = pyarrow.array(["young"] * len(table))
    pyarrow.parquet.write_table(table.set_column(2, "age", ages), source / "person.parquet")
    job = job_of(options_of(source, tmp_path))
    with pytest.raises(DataError, match=r"person\.parquet: cannot be read as table person: .*young"):
        run_in_memory(job.stages, tmp_path / "staging")


def test_parquet_without_values(tmp_path):
    path = tmp_path / "residence_locations.parquet"
    columns = {"rlid": [1, 2, 3, None], "longitude": [0.5, None, float("nan"), 1.0], "latitude": [1.0] * 4}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    (chunk,) = chunks_of("residence_locations", [path])
    (rows,) = read_chunk(chunk, ("rlid", "longitude", "latitude"))
    assert rows.columns["rlid"].tolist() == [1] and len(rows.letters) == 3


@pytest.mark.parametrize("value", ["inf", "1e999", "nan", "east"])
def test_a_place_without_finite_coordinates(tmp_path, value):
    path = tmp_path / "residence_locations.csv"
    path.write_text(f"rlid,longitude,latitude\n1,{value},2\n2,1e1,-.5\n")
    (chunk,) = chunks_of("residence_locations", [path])
    assert rows_in(chunk, ("rlid", "longitude", "latitude")) == [(2, 10.0, -0.5)]


def written(source, folder, **changes):
    """The shards and their index that the job makes of tables."""
    run_in_memory(job_of(options_of(source, folder, **changes)).stages, folder / "staging")
    found = contents(folder / "staging")
    return {name: content for name, content in found.items() if name.startswith(("shards/", ".index/"))}


def rows_in_target(folder):
    columns = ("pid", "infected")
    (chunk,) = chunks_of("target", find_table(folder, "target", columns))
    return rows_in(chunk, columns)


def rows_in(chunk, columns):
    parts = list(read_chunk(chunk, columns))
    return [row for part in parts for row in zip(*(part.columns[name].tolist() for name in columns), strict=True)]


def check_error(source, folder, message, **changes):
    """The job is refused in one line, before it is run."""
    with pytest.raises(DataError, match=message) as caught:
        job_of(options_of(source, folder, **changes))
    assert "\n" not in str(caught.value)
