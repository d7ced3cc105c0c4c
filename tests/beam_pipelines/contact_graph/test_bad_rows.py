"""Rows that cannot be used are kept aside and counted, leave the others as they were, and end the job if too many."""

import dataclasses

import pytest

from beam_pipelines.contact_graph.job import run_contact_graph_job
from tests.beam_pipelines.contact_graph.graph_support import (
    Contact,
    Person,
    Town,
    job_of,
    letters_of,
    options_of,
    read_rows,
    rows_of,
    run_in_memory,
    small_town,
)
from tff_pdp.data.manifest import RecordCounts
from tff_pdp.errors import DataError

TOWN = small_town()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return rows_of(TOWN, tmp_path_factory.mktemp("expected"))[0]


VALUES, LENGTH = "row_with_missing_or_wrong_value", "row_of_another_length"
PERSON, PLACE = "row_of_unknown_person", "row_of_unknown_household_or_place"
AGE_OR_SEX = "age_or_sex_out_of_range"
TIME, LABEL = "time_or_duration_out_of_range", "label_out_of_range"
NETWORK, STATES, ACTIVITIES = "population_network", "disease_outcome_training", "activity_location_assignment"
TABLES = ("person", "household", ACTIVITIES, STATES, "target", NETWORK)
BAD_ROWS = [
    ("person", "x,1,30,1,east,a", VALUES),
    ("person", "99,1,,1,east,a", VALUES),
    ("person", "99,1,30,1,,a", VALUES),
    ("person", "99,1,30.5,1,east,a", VALUES),
    ("person", "99,1,99999999999,1,east,a", VALUES),
    ("person", "99,1,30,300,east,a", VALUES),
    ("person", "99999999999999999999,1,30,1,east,a", VALUES),
    ("person", "99,1", LENGTH),
    ("person", "99,1,30,1,east,a,b", LENGTH),
    ("person", "99,77,30,1,east,a", PLACE),
    ("person", "99,1,-1,1,east,a", AGE_OR_SEX),
    ("person", "99,1,151,1,east,a", AGE_OR_SEX),
    ("person", "99,1,30,3,east,a", AGE_OR_SEX),
    ("person", "0x63,1,30,1,east,a", VALUES),
    ("household", "77", LENGTH),
    ("household", "77,many", VALUES),
    (ACTIVITIES, "1,7,9,0,100", TIME),
    (ACTIVITIES, "1,7,0,0,100", TIME),
    (ACTIVITIES, "1,7,1,0,-5", TIME),
    (ACTIVITIES, "1,7,1,0,86401", TIME),
    (ACTIVITIES, "99,7,1,0,5", PERSON),
    (ACTIVITIES, "1,7,,0,5", VALUES),
    (STATES, "3,1,X", VALUES),
    (STATES, "3,1,", VALUES),
    (STATES, "1e1,1,I", VALUES),
    (STATES, "-1,1,I", TIME),
    (STATES, "57,1,I", TIME),
    (STATES, "3,99,I", PERSON),
    ("target", "99,1", PERSON),
    ("target", "1,0.5", VALUES),
    ("target", "1", LENGTH),
    (NETWORK, "1,1,9,0,5,1,1", "contact_with_oneself"),
    (NETWORK, "99,99,9,0,5,1,1", "contact_with_oneself"),
    (NETWORK, "1,99,9,0,5,1,1", PERSON),
    (NETWORK, "99,1,9,0,5,1,1", PERSON),
    (NETWORK, "9223372036854775807,1,9,0,5,1,1", PERSON),
    (NETWORK, "-9223372036854775808,1,9,0,5,1,1", PERSON),
    (NETWORK, "1,3,9,0,-5,1,1", TIME),
    (NETWORK, "1,3,9,0,86401,1,1", TIME),
    (NETWORK, "0X1,3,9,0,5,1,1", VALUES),
    (NETWORK, "1,3,9,-1,5,1,1", TIME),
    (NETWORK, "1,3,9,86400,5,1,1", TIME),
    (NETWORK, "1,3,9,0,5,8,1", TIME),
    (NETWORK, "1,3,9,0,5,1,0", TIME),
    (NETWORK, "1,3,9,0,5,1,300", VALUES),
    (NETWORK, "1,3,9,0,99999999999,1,1", VALUES),
    (NETWORK, "1,3,9,0,five,1,1", VALUES),
    (NETWORK, "1,3,9,0,,1,1", VALUES),
    (NETWORK, "1,3,9,NaN,5,1,1", VALUES),
    (NETWORK, "1,3", LENGTH),
    (NETWORK, "1,3,9,0,5,1,1,1", LENGTH),
]


@pytest.mark.parametrize("first", range(5))
def test_bad_rows_are_kept_aside(tmp_path, expected, first):
    source = TOWN.write(tmp_path / "input")
    # Each time some of them together, spread over the tables.
    bad = BAD_ROWS[first::5]
    for table, line, _ in bad:
        append(source, table, line)
    counts, rows, letters = run(source, tmp_path)
    assert rows == expected
    tables = {table: counts.rows[table] for table, _, _ in bad}
    for table, found in tables.items():
        reasons = [reason for other, _, reason in bad if other == table]
        left_out = {reason: number for reason, number in found.dropped.items() if "silos" not in reason}
        assert left_out == {reason: reasons.count(reason) for reason in reasons}
        assert found.read == lines_in(source, table)
    assert sorted(letter["reason"] for letter in letters) == sorted(reason for _, _, reason in bad)
    assert {letter["source"].removesuffix(".csv") for letter in letters} == set(tables)
    raw = {letter["raw"] for letter in letters if letter["reason"] == LENGTH}
    assert raw == {line for _, line, reason in bad if reason == LENGTH}


def test_one_bad_value_does_not_change_how_others_are_read(tmp_path, expected):
    source = TOWN.write(tmp_path / "input")
    for table in TABLES:
        append(source, table, ",".join(["?"] * len((source / f"{table}.csv").read_text().split("\n")[0].split(","))))
    counts, rows, letters = run(source, tmp_path)
    assert rows == expected
    assert len(letters) == 6
    assert {table for table, of in counts.rows.items() if of.dropped.get(VALUES) == 1} == set(TABLES)


def test_a_value_that_is_no_text_is_kept_aside(tmp_path, expected):
    source = TOWN.write(tmp_path / "input")
    with (source / "person.csv").open("ab") as file:
        file.write(b"99,1,30,1,e\xffst,a\n")
    with (source / f"{NETWORK}.csv").open("ab") as file:
        file.write(b"1,3,9,0,\xff,1,1\n")
    counts, rows, letters = run(source, tmp_path)
    assert rows == expected
    assert [letter["reason"] for letter in letters] == [VALUES, VALUES]
    assert any("e\ufffdst" in letter["raw"] for letter in letters)
    assert counts.rows["person"].dropped[VALUES] == 1


def test_contacts_that_were_delivered_twice_are_told(tmp_path, caplog):
    source = TOWN.write(tmp_path / "input")
    run(source, tmp_path)
    assert not caplog.messages
    path = source / f"{NETWORK}.csv"
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines, *lines]))
    run(source, tmp_path / "again")
    assert any("of the contacts repeat another contact exactly" in message for message in caplog.messages)
    assert any(f"{NETWORK}.csv: the last line does not end" in message for message in caplog.messages)


def test_same_row_twice_counts_once(tmp_path, expected):
    source = TOWN.write(tmp_path / "input")
    for table in ("person", "household", "target"):
        append(source, table, (source / f"{table}.csv").read_text().split("\n")[2])
    counts, rows, letters = run(source, tmp_path)
    assert rows == expected and not letters
    assert all(
        counts.rows[table].dropped == {"identical_row_of_same_id": 1} for table in ("person", "household", "target")
    )


def test_rows_that_contradict_each_other_are_all_left_out(tmp_path, expected):
    source = TOWN.write(tmp_path / "input")
    append(source, "person", "5,0,99,1,east,a")
    counts, rows, letters = run(source, tmp_path)
    assert counts.rows["person"].dropped == {"rows_of_same_id_differ": 2}
    assert counts.rows[NETWORK].dropped[PERSON] == sum(5 in contact.ends for contact in TOWN.contacts)
    assert counts.rows["target"].dropped == {PERSON: 1}
    assert {letter["client"] for letter in letters if letter["source"] == "person"} == {"5"}
    others = {name: row for name, row in expected.items() if name in rows}
    assert len(expected) - len(others) == 2
    met = {pid for contact in TOWN.contacts if 5 in contact.ends for pid in contact.ends - {5}}
    inside = [pid for pid in met if TOWN.people[pid].region == TOWN.people[5].region]
    assert 0 < sum(rows[name] != row for name, row in others.items()) <= 2 * len(inside)


def test_household_of_two_sizes(tmp_path):
    source = TOWN.write(tmp_path / "input")
    append(source, "household", "3,9")
    counts, _, _ = run(source, tmp_path)
    assert counts.rows["household"].dropped == {"rows_of_same_id_differ": 2}
    assert counts.rows["person"].dropped == {PLACE: sum(person.hid == 3 for person in TOWN.people.values())}


def test_two_targets(tmp_path):
    source = TOWN.write(tmp_path / "input")
    append(source, "target", f"4,{int(not TOWN.people[4].target)}")
    append(source, "target", "6,2")
    counts, rows, _ = run(source, tmp_path)
    assert counts.rows["target"].dropped == {"rows_of_same_id_differ": 4}
    assert sum(row.split == "test" for row in rows.values()) == len(TOWN.people) - 2
    (tmp_path / "other").mkdir()
    source = Town({1: Person(target=2), 2: Person(target=1)}).write(tmp_path / "other" / "input")
    counts, rows, _ = run(source, tmp_path / "other")
    assert counts.rows["target"].dropped == {LABEL: 1}
    assert sum(row.split == "test" for row in rows.values()) == 1


@pytest.mark.parametrize("lines", [["9,1,R", "9,1,I"], ["9,1,R", "12,1,I"]], ids=["same day", "later"])
def test_nobody_recovers_before_falling_ill(tmp_path, lines):
    people = {pid: dataclasses.replace(TOWN.people[pid], infected=None, recovered=None) for pid in TOWN.people}
    source = dataclasses.replace(TOWN, people=people).write(tmp_path / "input")
    for line in lines:
        append(source, STATES, line)
    counts, rows, letters = run(source, tmp_path)
    assert counts.rows["person"].dropped == {"states_of_disease_go_back": 1}
    assert "1" in {letter["client"] for letter in letters if letter["reason"] == "states_of_disease_go_back"}
    assert len(rows) == 2 * (len(people) - 1)


def test_contacts_between_silos_and_groups_are_no_bad_rows(tmp_path):
    rule = {"kind": "public_groups", "group_column": "person.school", "max_group_size": 24}
    counts, _, letters = run(TOWN.write(tmp_path / "input"), tmp_path, degree_bound=rule)
    people = TOWN.people
    kept = sum(
        people[c.pid1].region == people[c.pid2].region and people[c.pid1].school == people[c.pid2].school
        for c in TOWN.contacts
    )
    assert counts.rows[NETWORK].kept == kept > 0
    assert counts.rows["contact_ends"] == RecordCounts(2 * kept, 2 * kept, {})
    assert counts.rows[NETWORK].dropped == {"contact_between_silos_or_groups": len(TOWN.contacts) - kept}
    assert not letters


def test_small_silos_are_left_out(tmp_path):
    people = {**TOWN.people, 30: Person("north", hid=1, target=1), 31: Person("north", hid=1)}
    town = Town(people, (*TOWN.contacts, Contact(30, 31)), TOWN.household_sizes)
    counts, rows, _ = run(town.write(tmp_path / "input"), tmp_path, min_people_per_silo=3, num_windows=2)
    assert {row.client for row in rows.values()} == {"east", "west"}
    # Two of two windows, and one test.
    assert {reason: (tally.users, tally.examples) for reason, tally in counts.dropped.items()} == {
        "client_below_min_examples": (1, 5)
    }
    assert counts.rows[NETWORK].dropped[PERSON] == 1
    assert counts.rows["person"].dropped == {"client_below_min_examples": 2}
    assert counts.rows["person"].kept == len(TOWN.people)


def test_silos_by_household_and_by_number(tmp_path):
    source = TOWN.write(tmp_path / "input")
    for silo_by, names in (
        ("household.hh_size", {"2", "3", "4", "5", "6"}),
        ("person.hid", {"0", "1", "2", "3", "4"}),
        ("person.school", {"a", "b"}),
    ):
        counts, rows, letters = run(source, tmp_path, silo_by=silo_by)
        assert {row.client for row in rows.values()} == names
        assert counts.kept.users == len(names) and not letters


def test_silos_by_where_people_live(tmp_path):
    # 11 is south-west of the origin; 12 and 13 are in one cell of half a degree, 13 on its edge.
    places = {11: (-0.1, -0.1), 12: (0.7, 1.2), 13: (0.5, 1.0), 14: (1.0, 1.0)}
    homes = {1: 11, 2: 12, 3: 13, 4: 14, 5: 99}
    source = Town({pid: Person(age=pid) for pid in range(1, 7)}, (Contact(2, 3), Contact(3, 4))).write(
        tmp_path / "input"
    )
    (source / "residence_locations.csv").write_text(
        "rlid,longitude,latitude\n" + "".join(f"{place},{x},{y}\n" for place, (x, y) in places.items())
    )
    for pid, place in homes.items():
        append(source, ACTIVITIES, f"{pid},{place},1,0,100")
    append(source, ACTIVITIES, "4,11,2,0,100")
    counts, rows, _ = run(source, tmp_path, silo_by="residence_grid.0.5", num_slots=0)
    clients = {row.x[0]: row.client for row in rows.values()}
    ages = {
        round(2.55 * age): cell for age, cell in {1: "cell_-1_-1", 2: "cell_2_1", 3: "cell_2_1", 4: "cell_2_2"}.items()
    }
    assert clients == ages
    # One at a place that is not in the table, one without a home.
    assert counts.rows["person"].dropped == {PLACE: 2}
    assert counts.rows["homes"] == RecordCounts(5, 5, {})
    assert counts.rows[NETWORK].kept == 1


def test_broken_promise_names_somebody(tmp_path):
    people = {pid: Person() for pid in range(10, 15)}
    contacts = tuple(Contact(10, pid) for pid in range(11, 15))
    town = Town(people, (*contacts, *contacts))
    rule = {"kind": "promise", "max_degree": 3}
    with pytest.raises(
        DataError, match=r"person 10 has met 4 people of the same silo, more than the promised max_degree 3"
    ):
        rows_of(town, tmp_path, degree_bound=rule)
    # Other people count, not meetings, and only those of the own silo.
    rows_of(town, tmp_path, degree_bound={**rule, "max_degree": 4})
    people = {**people, 14: Person("west")}
    rows_of(dataclasses.replace(town, people=people), tmp_path, degree_bound=rule)


@pytest.mark.parametrize("column", ["person.hid", "household.hid"])
def test_too_large_group(tmp_path, column):
    sizes = [sum(person.hid == hid for person in TOWN.people.values()) for hid in range(5)]
    rule = {"kind": "public_groups", "group_column": column, "max_group_size": max(sizes) - 1}
    with pytest.raises(DataError, match=rf"group by {column} has {max(sizes)} people, more than max_group_size"):
        rows_of(TOWN, tmp_path, degree_bound=rule)


@pytest.mark.parametrize("exchange", ["files", "runner"])
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "promise", "max_degree": 1}, r"person \d+ has met \d+ people"),
        ({"kind": "public_groups", "group_column": "person.hid", "max_group_size": 1}, "max_group_size 1"),
    ],
)
def test_refused_graphs_leave_nothing(tmp_path, exchange, rule, message):
    options = options_of(TOWN.write(tmp_path / "input"), tmp_path, degree_bound=rule, exchange=exchange)
    with pytest.raises(DataError, match=message):
        run_contact_graph_job(options)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".rows.lock", "input"]


def test_too_many_bad_rows(tmp_path):
    source = TOWN.write(tmp_path / "input")
    append(source, NETWORK, "1,1,9,0,5,1,1")
    size = lines_in(source, NETWORK)
    options = options_of(source, tmp_path, max_bad_fraction=0.9 / size)
    with pytest.raises(
        DataError, match=rf"1\.4% of {size} rows of population_network cannot be used.*contact_with_oneself"
    ):
        run_contact_graph_job(options)
    (kept,) = (tmp_path / "rows.dead_letters").iterdir()
    assert kept.read_text().count("\n") == 1
    summary = run_contact_graph_job(dataclasses.replace(options, max_bad_fraction=1.1 / size))
    assert summary.manifest.rows[NETWORK].dropped["contact_with_oneself"] == 1
    assert [letter["client"] for letter in letters_of(summary.output)] == ["1"]


def test_no_silo_is_left(tmp_path):
    options = options_of(TOWN.write(tmp_path / "input"), tmp_path, min_people_per_silo=100)
    with pytest.raises(DataError, match="no client is left of the 2 users read"):
        run_contact_graph_job(options)


def run(source, folder, **changes):
    """What the job counts, makes and keeps aside."""
    job = job_of(options_of(source, folder, **changes))
    counts = run_in_memory(job.stages, folder / "staging")
    return counts, read_rows(folder / "staging", job), letters_of(folder / "staging")


def append(source, table, line):
    with open(source / f"{table}.csv", "a") as file:
        file.write(line + "\n")


def lines_in(source, table):
    return (source / f"{table}.csv").read_text().count("\n") - 1
