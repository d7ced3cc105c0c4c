"""What rows hold, worked out by hand for a town of four, and by plain Python for a larger one."""

import itertools

import numpy as np
import pytest

from beam_pipelines.contact_graph.rows import RowLayout
from beam_pipelines.contact_graph.tables import write_about
from tests.beam_pipelines.contact_graph.graph_support import (
    Contact,
    Person,
    Town,
    hash_by_hand,
    job_of,
    name_by_hand,
    options_of,
    random_person,
    read_rows,
    rows_of,
    run_in_memory,
)

# Five days, of which rows look at three and predict two: training rows look at days 0 to 2, tests at days 2 to 4.
TIMES = {"num_days": 5, "window_days": 3, "prediction_days": 2}
TOWN = Town(
    {
        1: Person(hid=1, age=40, sex=1, activities=((1, 43_200), (2, 10_800), (2, 10_800)), target=1),
        # Fell ill before what training rows predict.
        2: Person(hid=2, age=120, sex=2, infected=1, recovered=3, target=0),
        # On the first day of it, and on the last.
        3: Person(hid=1, age=20, sex=0, infected=3, recovered=4),
        4: Person(hid=2, age=0, sex=1, infected=4),
    },
    (
        Contact(1, 2, start=43_200, duration=43_200, activity1=1, activity2=2),
        Contact(2, 1, start=21_600, duration=21_600, activity1=5, activity2=3),
        # One contact lasts for the two observed days at most; a pair can have several at the same time.
        Contact(3, 1, start=0, duration=172_800, activity1=7, activity2=2),
        Contact(3, 1, start=3_600, duration=172_800, activity1=7, activity2=2),
        Contact(3, 1, start=7_200, duration=54_400, activity1=7, activity2=2),
        Contact(4, 2, start=0, duration=172_800),
        Contact(4, 2, start=3_600, duration=27_200),
    ),
    {1: 4, 2: 25},
)
# Of 255: 40 of 100 years, 4 of 10 people, 12 and 6 hours of 24.
FIRST = {
    "age": 102,
    "is_male": 255,
    "household_size": 102,
    "does_home": 255,
    "does_work": 255,
    "share_of_day_home": 128,
    "share_of_day_work": 64,
}
# Older than 100, and in a household of more than 10.
SECOND = {"age": 255, "is_female": 255, "household_size": 255}
THIRD = {"age": 51, "household_size": 102}
FOURTH = {"is_male": 255, "household_size": 255}
# 18 hours, in two contacts, of two days: 9 a day; 1 a day, of 20; the earlier at 6 o'clock.
FIRST_AND_SECOND = {"present": 255, "hours": 96, "number_of_contacts": 13, "start": 64}
# More than all day long, 400,000 and 200,000 seconds of two days, from midnight; 1.5 and 1 contacts a day, of 20.
FIRST_AND_THIRD = {"present": 255, "hours": 255, "number_of_contacts": 19}
SECOND_AND_FOURTH = {"present": 255, "hours": 255, "number_of_contacts": 13}


def test_slots(tmp_path):
    rows = by_person(tmp_path, layout="slots", num_slots=3)
    assert {name: len(of) for name, of in rows.items()} == {"row": 4, "test": 2}
    with_second = {**SECOND, **FIRST_AND_SECOND, "at_home": 255, "at_shopping": 255}
    with_third = {**THIRD, **FIRST_AND_THIRD, "at_work": 255}
    expected = slots(
        1,
        {
            2: {**with_second, "infectious_day-2": 255, "infectious_day-1": 255},
            # Who falls ill on day 3 is well until then.
            3: with_third,
        },
    )
    assert rows["row"][1] == ({**FIRST, "share_of_slots": 170, "always_susceptible": 255, **expected}, 0)
    expected = slots(
        1,
        {
            2: {**with_second, "infectious_day-3": 255, "recovered_day-2": 255, "recovered_day-1": 255},
            3: {**with_third, "infectious_day-2": 255, "recovered_day-1": 255},
        },
    )
    assert rows["test"][1] == ({**FIRST, "share_of_slots": 170, "always_susceptible": 255, **expected}, 1)
    expected = slots(
        2,
        {
            1: {**FIRST, **FIRST_AND_SECOND, "at_work": 255, "at_school": 255},
            4: {**FOURTH, **SECOND_AND_FOURTH, "at_home": 255},
        },
    )
    own = {**SECOND, "share_of_slots": 170, "infectious_day-2": 255, "infectious_day-1": 255}
    assert rows["row"][2] == ({**own, **expected}, 0)
    # Of those who fall ill on the first and on the last day: they were well before.
    for pid, own, contact in (
        (3, THIRD, {1: {**FIRST, **FIRST_AND_THIRD, "at_religion": 255}}),
        (4, FOURTH, {2: {**SECOND, **SECOND_AND_FOURTH, "at_home": 255}}),
    ):
        ill = {"infectious_day-2": 255, "infectious_day-1": 255} if pid == 4 else {}
        expected = slots(pid, {other: {**block, **ill} for other, block in contact.items()})
        assert rows["row"][pid] == ({**own, "share_of_slots": 85, "always_susceptible": 255, **expected}, 1)


def test_one_slot_holds_the_contact_with_the_smallest_hash(tmp_path):
    rows = by_person(tmp_path, layout="slots", num_slots=1)
    chosen = min((2, 3), key=lambda other: hash_by_hand(0, "contacts", 1, other))
    row, _ = rows["row"][1]
    assert row["contact0_age"] == {2: 255, 3: 51}[chosen]
    assert row["share_of_slots"] == 255 and not any(name.startswith("contact1") for name in row)


def test_summary(tmp_path):
    rows = by_person(tmp_path, layout="summary", num_slots=3)
    means = {
        "present": 170,
        "age": (255 + 51) // 3,
        "is_female": 85,
        "household_size": (255 + 102) // 3,
        "hours": (96 + 255) // 3,
        "number_of_contacts": 11,  # (13 + 19) / 3
        "start": 21,  # 64 / 3
        "at_home": 85,
        "at_shopping": 85,
        "at_work": 85,
        "infectious_day-2": 85,
        "infectious_day-1": 85,
    }
    exposure = {"hours_with_infectious_day-2": 96, "hours_with_infectious_day-1": 96}
    expected = {f"contacts_{name}": value for name, value in means.items()} | exposure
    assert rows["row"][1] == ({**FIRST, "share_of_slots": 170, "always_susceptible": 255, **expected}, 0)
    # 28 hours a day with someone infectious count as 24.
    row, label = rows["row"][4]
    assert {name: value for name, value in row.items() if "infectious" in name} == {
        "contacts_infectious_day-2": 85,
        "contacts_infectious_day-1": 85,
        "hours_with_infectious_day-2": 255,
        "hours_with_infectious_day-1": 255,
    }
    assert label == 1


def test_rows_without_contacts(tmp_path):
    rows = by_person(tmp_path, num_slots=0)
    assert rows["row"][1] == ({**FIRST, "always_susceptible": 255}, 0)
    assert rows["test"][2] == ({**SECOND, "infectious_day-3": 255, "recovered_day-2": 255, "recovered_day-1": 255}, 0)


@pytest.mark.parametrize("kind", ["slots", "summary"])
@pytest.mark.parametrize("num_slots", [0, 1, 4])
def test_every_number_has_a_name_of_its_own(kind, num_slots):
    layout = RowLayout(kind, num_slots, 3)
    assert len(set(layout.names)) == layout.size
    # Age, sex, household and 14 of activities; place in the row, well, and 2 x 3 days.
    own, block = 18 + 1 + 1 + 6, 1 + 18 + 3 + 7 + 6
    blocks = {"slots": num_slots * block, "summary": block + 3 if num_slots else 0}
    assert layout.size == own + blocks[kind]


def test_windows_labels_and_splits_of_many(tmp_path):
    generator = np.random.default_rng(0)
    people = {pid: random_person(generator, target=None) for pid in range(1000, 1300)}
    seed, windows = 5, 2
    rows, _ = rows_of(
        Town(people), tmp_path, seed=seed, num_windows=windows, validation_fraction=0.3, num_slots=0, num_shards=3
    )
    expected, starts, ages = {}, set(), {}
    for pid, person in people.items():
        split = "validation" if hash_by_hand(seed, "split", pid) < 0.3 * 2**64 else "train"
        for window in range(windows):
            # Of days 21 to 50, all of which leave 21 before and 7 from them on.
            start = 21 + hash_by_hand(seed, "window", pid, window) % 30
            label = person.infected is not None and start <= person.infected < start + 7
            name = name_by_hand(seed, "row", pid, window)
            starts.add(start)
            expected[name] = (split, label)
            ages[name] = person.age * 2.55
    assert {name: (row.split, row.y) for name, row in rows.items()} == expected
    # The nearest of 255 levels; a product of doubles is off by less than 2^-45.
    assert {name: row.x[0] for name, row in rows.items()} == pytest.approx(ages, abs=0.5 + 2**-45)
    assert starts == set(range(21, 51))
    assert 140 < sum(split == "validation" for split, _ in expected.values()) < 220
    assert 20 < sum(label for _, label in expected.values()) < 300


@pytest.mark.parametrize("first", [-(2**63), -5, 2**63 - 20])
@pytest.mark.parametrize("spread", [1, 7, 2**58])
def test_ids_may_be_any_integers(tmp_path, first, spread):
    pids = [first + number * spread * (1 if first < 2**62 else -1) for number in range(8)]
    people = {pid: Person(age=number) for number, pid in enumerate(pids)}
    rows, job = rows_of(
        Town(people, tuple(Contact(*pair) for pair in itertools.pairwise(pids))), tmp_path, num_slots=2, num_shards=3
    )
    present = [place for place, name in enumerate(job.parameters["features"]) if name.endswith("_present")]
    met = {round(row.x[0] / 2.55): sum(row.x[place] == 255 for place in present) for row in rows.values()}
    assert met == {0: 1, **dict.fromkeys(range(1, 7), 2), 7: 1}


def by_person(folder, **changes):
    """The numbers that are not zero, by name, and the label, of every person's row and test."""
    source = TOWN.write(folder / "input", TIMES["num_days"])
    write_about(source, {"observed_days": 2})
    job = job_of(options_of(source, folder, validation_fraction=0, **TIMES, **changes))
    run_in_memory(job.stages, folder / "staging")
    rows = read_rows(folder / "staging", job)
    found = {"row": {}, "test": {}}
    for purpose, ids in (("row", (0,)), ("test", ())):
        for pid in TOWN.people:
            name = name_by_hand(0, purpose, pid, *ids)
            if name in rows:
                row = rows.pop(name)
                assert row.split == ("test" if purpose == "test" else "train") and row.client == "east"
                numbers = dict(zip(job.parameters["features"], row.x, strict=True))
                found[purpose][pid] = ({key: value for key, value in numbers.items() if value}, row.y)
    assert not rows
    return found


def slots(pid, contacts):
    """The numbers of contacts, in the order of their hashes."""
    order = sorted(contacts, key=lambda other: hash_by_hand(0, "contacts", pid, other))
    return {
        f"contact{slot}_{name}": value for slot, other in enumerate(order) for name, value in contacts[other].items()
    }
