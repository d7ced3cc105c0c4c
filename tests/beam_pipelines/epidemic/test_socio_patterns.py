"""SocioPatterns files become tables: runs by hand, metadata of every published form, and errors that name the line."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from beam_pipelines.epidemic.socio_patterns import ImportOptions, find_runs, import_contacts
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import read_settings

# 5 and 3 meet for three steps, then again; 3 and 9 once, on the next day; a repeated row and one of 9 with itself.
CONTACTS = """\
20 5 3
40\t3\t5
60 5 3
60 5 3

100 3 5
86420 9 3
86440 9 9
"""
DAYS = {"observed_days": 2}
METADATA = "3\t1A\tF\n5\t1B\tM\n9\tTeachers\tNaN\n12\t1A\tF\n"


@pytest.fixture
def convert(tmp_path):
    def convert(contacts=CONTACTS, metadata=None, **options):
        (tmp_path / "tij.dat").write_text(contacts)
        if metadata is not None:
            (tmp_path / "metadata.dat").write_text(metadata)
        where = tmp_path / "metadata.dat" if metadata is not None else None
        summary = import_contacts(
            tmp_path / "tij.dat", where, tmp_path / "out", ImportOptions(**{**DAYS, **options}), overwrite=True
        )
        return summary, *(read(tmp_path / "out", name) for name in ("person", "population_network"))

    return convert


def test_runs_become_rows(convert, tmp_path):
    summary, _, network = convert(metadata=METADATA)
    # A row's time is the end of its step.
    assert network == [
        contact(pid1=3, pid2=5, start_time=0, duration=60),
        contact(pid1=3, pid2=5, start_time=80, duration=20),
        contact(pid1=3, pid2=9, start_time=0, duration=20),
    ]
    assert (summary.num_rows, summary.num_repeated, summary.num_self_contacts, summary.num_days) == (3, 1, 1, 2)
    assert json.loads((tmp_path / "out" / "about.json").read_text())["observed_days"] == 2
    assert read(tmp_path / "out", "household") == [{"hid": pid, "hh_size": 1} for pid in (3, 5, 9, 12)]


def test_people_of_the_metadata_stay(convert):
    summary, person, _ = convert(metadata=METADATA)
    assert [(row["pid"], row["region"], row["sex"], row["age"]) for row in person] == [
        (3, "1A", 2, 0),
        (5, "1B", 1, 0),
        (9, "Teachers", 0, 0),
        (12, "1A", 2, 0),
    ]
    assert (summary.num_people, summary.num_without_contacts, summary.num_without_metadata) == (4, 1, 0)
    assert summary.regions == {"1A": 2, "1B": 1, "Teachers": 1}


@pytest.mark.parametrize(
    ("metadata", "options", "regions", "sexes"),
    [
        (None, {}, ["unknown"] * 3, [0, 0, 0]),
        ("3\tDISQ\n5\tDSE\n", {}, ["DISQ", "DSE", "unknown"], [0, 0, 0]),
        ("0\t3\tADM\n1\t5\tNUR\n2\t9\tPAT\n", {}, ["ADM", "NUR", "PAT"], [0, 0, 0]),
        ("3 1A F\n5 1B M\n9 1B M\n", {}, ["1A", "1B", "1B"], [2, 1, 1]),
        ("3\t0\tF\tC1\tNo\n5\t1\tNA\tNA\tNA\n9\tNA\tM\tOther\tYes\n", {}, ["C1", "unknown", "Other"], [2, 0, 1]),
        (
            "3\t0\tF\tC1\tNo\n5\t1\tNA\tNA\tNA\n9\tNA\tM\tOther\tYes\n",
            {"region_column": 5},
            ["No", "unknown", "Yes"],
            [2, 0, 1],
        ),
        ("3\tF\n5\tM\n9\tM\n", {}, ["unknown"] * 3, [2, 1, 1]),
    ],
)
def test_columns_of_the_metadata_are_found(convert, metadata, options, regions, sexes):
    _, person, _ = convert(metadata=metadata, **options)
    assert [row["pid"] for row in person] == [3, 5, 9]
    assert ([row["region"] for row in person], [row["sex"] for row in person]) == (regions, sexes)


def test_days_begin_at_midnight(convert):
    # Half past eleven in the evening; the second meeting ends after midnight and the third begins then.
    contacts = "84620 1 2\n86400 1 2\n86420 1 2\n86480 1 2\n"
    summary, _, network = convert(contacts)
    assert [(row["start_time"], row["duration"]) for row in network] == [(84600, 20), (86380, 40), (60, 20)]
    assert summary.num_days == 2
    summary, _, network = convert(contacts, hours_ahead=2.0, activity=5)
    assert [(row["start_time"], row["duration"]) for row in network] == [(5400, 20), (7180, 40), (7260, 20)]
    assert summary.num_days == 1 and {row["activity1"] for row in network} == {5}


def test_observed_days_are_not_counted(convert, tmp_path):
    for contacts in (CONTACTS, "20 1 2\n", ""):
        convert(contacts, observed_days=7)
        assert json.loads((tmp_path / "out" / "about.json").read_text())["observed_days"] == 7
    with pytest.raises(DataError, match=r"tij\.dat: people met on more days than observed_days, 1: "):
        convert(observed_days=1)
    for days in (0, 1.5, True, "3"):
        with pytest.raises(ConfigError, match=f"observed_days must be a whole number of at least 1, not {days!r}"):
            read_settings(ImportOptions, {"observed_days": days}, "the command line")


def test_overlapping_steps_of_two_clocks_are_one_run():
    rows = np.array([[0, 1, 2], [10, 2, 1], [30, 1, 2], [60, 1, 2], [0, 1, 3]])
    runs, num_repeated = find_runs(rows)
    assert runs.tolist() == [[1, 2, 0, 50], [1, 2, 60, 20], [1, 3, 0, 20]] and num_repeated == 0


def test_no_contacts_at_all(convert):
    summary, person, network = convert("", METADATA)
    assert len(person) == 4 and network == [] and summary.num_days == 0


@pytest.mark.parametrize(
    ("contacts", "metadata", "message"),
    [
        ("20 1 2\n40 1\n", None, r"tij\.dat, line 2: '40 1' is not three integers"),
        ("20 1 2 3\n", None, r"tij\.dat, line 1: "),
        ("20 1 2.5\n", None, r"tij\.dat, line 1: "),
        ("20 1 2\n\n-20 1 2\n", None, r"tij\.dat, line 3: .* out of range"),
        ("20 1 2\n", "1\tA\n2\tB\tM\n", r"metadata\.dat, line 2: 3 columns; the first line has 2"),
        ("20 1 2\n", "1\tA\n\n2\tA\n1\tB\n", r"metadata\.dat, line 4: person 1 occurs more than once"),
        ("20 1 2\n", "1\tA\nx\tA\n", r"metadata\.dat, line 2: 'x' in column 1 is not a person's id"),
        ("20 1 2\n", "7\tA\n8\tA\n", r"metadata\.dat: no column has ids"),
        ("20 1 2\n", "", r"metadata\.dat: no rows"),
    ],
)
def test_malformed_rows_are_named(convert, contacts, metadata, message):
    with pytest.raises(DataError, match=message):
        convert(contacts, metadata)


def test_unusable_files_are_named(tmp_path):
    path = tmp_path / "tij.dat.gz"
    for content in (b"20 1 2\n", gzip.compress(b"20 1 2\n" * 999)[:-20]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"tij\.dat\.gz: truncated or damaged"):
            import_contacts(path, None, tmp_path / "out", ImportOptions(**DAYS))
    path.write_bytes(gzip.compress(b"20 1 \xff\n"))
    with pytest.raises(DataError, match=r"tij\.dat\.gz: not UTF-8"):
        import_contacts(path, None, tmp_path / "out", ImportOptions(**DAYS))
    with pytest.raises(DataError, match=r"none\.dat: cannot be read"):
        import_contacts(tmp_path / "none.dat", None, tmp_path / "out", ImportOptions(**DAYS))
    assert not (tmp_path / "out").exists()


def test_impossible_columns_are_named(convert):
    with pytest.raises(ConfigError, match=r"region_column 4: .*metadata\.dat has 3 columns"):
        convert(metadata=METADATA, region_column=4)
    with pytest.raises(ConfigError, match="region_column must be a whole number of at least 1, or nothing, not 0"):
        read_settings(ImportOptions, {**DAYS, "region_column": 0}, "the command line")


@pytest.mark.parametrize(
    ("study", "num_people", "num_steps", "num_days", "num_regions"),
    [
        ("hospital", 75, 32_424, 5, 4),
        ("PS09", 242, 125_773, 2, 11),
        ("InVS13", 92, 9_827, 10, 5),
        ("thiers13", 329, 188_508, 5, 9),
        ("HT09", 113, 20_818, 3, 1),
        ("WS16", 138, 153_371, 2, 3),
    ],
)
def test_published_studies(tmp_path, study, num_people, num_steps, num_days, num_regions):
    if "TFF_PDP_DATA" not in os.environ:
        pytest.skip("TFF_PDP_DATA is not set: no SocioPatterns files")
    folder = Path(os.environ["TFF_PDP_DATA"]) / "contacts" / study
    (contacts,) = folder.glob("tij_*")
    summary = import_contacts(
        contacts, next(folder.glob("metadata_*"), None), tmp_path, ImportOptions(observed_days=num_days)
    )
    assert (summary.num_people, summary.num_days, len(summary.regions)) == (num_people, num_days, num_regions)
    assert summary.num_repeated == summary.num_self_contacts == 0
    # All steps have 20 seconds, and no row repeats another.
    durations = pyarrow.parquet.read_table(tmp_path / "population_network.parquet")["duration"]
    assert durations.to_numpy().sum() == 20 * num_steps


def contact(**columns):
    return {**columns, "lid": 1, "activity1": 4, "activity2": 4}


def read(folder, table):
    return pyarrow.parquet.read_table(folder / f"{table}.parquet").to_pylist()
