"""No person, and no pair's contacts, changes more rows than the manifest says; by trying all of them in small towns."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from beam_pipelines.keyed_hash import hexadecimal_names, keyed_uint64
from tests.beam_pipelines.contact_graph.graph_support import (
    SILOS,
    Contact,
    Person,
    Town,
    random_contact,
    random_person,
    rows_of,
)

WINDOWS = 2
# Seed, people anybody may have met (D), and how rows are made: with fewer slots than contacts, as many, and more.
WORLDS = {
    "sparse slots": (0, 3, {"layout": "slots", "num_slots": 4}),
    "dense summary": (1, 5, {"layout": "summary", "num_slots": 3}),
    "dense slots": (2, 5, {"layout": "slots", "num_slots": 2}),
    "exposure": (4, 4, {"layout": "exposure", "num_slots": 3}),
}


# Each layout is in make test once.
@pytest.fixture(
    params=[
        pytest.param(world, id=name, marks=[pytest.mark.all] if name == "dense slots" else [])
        for name, world in WORLDS.items()
    ]
)
def world(request, tmp_path):
    seed, degree, rows = request.param
    generator = np.random.default_rng(seed)
    return World(generator, degree, random_town(generator, degree), tmp_path, rows)


def test_promise_when_a_person_leaves(world):
    rule = {"kind": "promise", "max_degree": world.degree, "adjacency": "replace_special"}
    before, bound = world.rows(world.town, rule)
    assert bound == WINDOWS * (world.degree + 1)
    most = 0
    for pid, person in world.town.people.items():
        after, _ = world.rows(without(world.town, pid), rule)
        # The person's own rows become rows of zeros, which the job does not write.
        most = max(most, check(before, after, bound, {person.region}, world.own(pid)))
    assert most > WINDOWS, "an empty graph shows nothing"


def test_promise_when_a_person_is_replaced(world):
    rule = {"kind": "promise", "max_degree": world.degree}
    before, bound = world.rows(world.town, rule)
    assert bound == WINDOWS * (2 * world.degree + 1)
    most = 0
    for pid, person in world.town.people.items():
        after, _ = world.rows(world.replaced(pid, keeps_promise=True), rule)
        most = max(most, check(before, after, bound, {person.region}, world.own(pid)))
    assert most > WINDOWS


@pytest.mark.parametrize("column", ["person.school", "household.hid"])
def test_public_groups(world, column):
    key = column.partition(".")[2]
    groups = {}
    for person in world.town.people.values():
        groups.setdefault(getattr(person, key), []).append(person)
    size = max(map(len, groups.values()))
    rule = {"kind": "public_groups", "group_column": column, "max_group_size": size}
    before, bound = world.rows(world.town, rule)
    assert bound == WINDOWS * size
    most = 0
    for pid, person in world.town.people.items():
        after, _ = world.rows(world.replaced(pid, keeps_promise=False, **{key: getattr(person, key)}), rule)
        most = max(most, check(before, after, bound, {person.region}, world.own(pid)))
    assert most > WINDOWS


def test_contacts_of_every_pair(world):
    rule = {"kind": "edge"}
    before, bound = world.rows(world.town, rule)
    assert bound == WINDOWS * 2
    people = world.town.people
    met = {contact.ends for contact in world.town.contacts}
    most = 0
    for first, second in itertools.combinations(people, 2):
        # Of pairs that live apart, those of one person will do.
        if people[first].region != people[second].region and first != next(iter(people)):
            continue
        pair = frozenset((first, second))
        contacts = [contact for contact in world.town.contacts if contact.ends != pair]
        if pair not in met:
            contacts += [world.contact(first, second) for _ in range(world.generator.integers(1, 3))]
        after, _ = world.rows(dataclasses.replace(world.town, contacts=tuple(contacts)), rule)
        silos = {people[first].region} & {people[second].region}
        most = max(most, check(before, after, bound, silos, world.own(first) | world.own(second)))
    assert most == bound


def test_rows_of_one_window_are_among_those_of_two(world):
    rule = {"kind": "promise", "max_degree": world.degree}
    one, bound = world.rows(world.town, rule, num_windows=1)
    assert bound == 2 * world.degree + 1
    two, _ = world.rows(world.town, rule)
    first_windows = {name for pid in world.town.people for name in world.own(pid, 1)}
    assert {name: two[name] for name in first_windows} == {
        name: row for name, row in one.items() if row.split == "train"
    }


STAR = {
    "leaves": ({"kind": "promise", "max_degree": 5, "adjacency": "replace_special"}, 6),
    "is replaced": ({"kind": "promise", "max_degree": 5}, 11),
    "in its group": ({"kind": "public_groups", "group_column": "person.school", "max_group_size": 11}, 11),
}


@pytest.mark.parametrize("num_windows", [1, 2])
@pytest.mark.parametrize("layout", ["slots", "summary"])
@pytest.mark.parametrize(("rule", "expected"), STAR.values(), ids=STAR.keys())
def test_middle_of_a_star_changes_as_many_rows_as_the_bound_says(tmp_path, rule, expected, layout, num_windows):
    # Somebody who met five people meets five others instead, or nobody; within a group, falls ill after meeting all.
    others, hub = range(1, 11), 0
    people = {pid: Person(age=pid, target=0) for pid in (hub, *others)}
    is_group = rule["kind"] == "public_groups"
    before = Town(people, tuple(Contact(hub, pid) for pid in (others if is_group else others[:5])))
    if rule.get("adjacency") == "replace_special":
        after = without(before, hub)
    else:
        turned = {**people, hub: Person(age=90, infected=1, recovered=50)}
        after = Town(turned, tuple(Contact(pid, hub) for pid in (others if is_group else others[5:])))
    changes = {"layout": layout, "num_slots": 4, "num_windows": num_windows, "validation_fraction": 0, "num_shards": 1}
    rows, job = rows_of(before, tmp_path, degree_bound=rule, **changes)
    changed, _ = rows_of(after, tmp_path, degree_bound=rule, **changes)
    assert job.row_influence is not None and job.row_influence.num_rows == num_windows * expected
    assert len(train_difference(rows, changed) | own_names(hub, num_windows)) == num_windows * expected


def test_rank_based_capping_is_no_bound(tmp_path):
    """Everybody keeps the D first of its contacts by hash, and a contact stays if both ends keep it.

    Why this is not offered: when the hub leaves, each of its contacts that had kept the hub keeps another one instead,
    whose row changes, too. How many there are is bounded by nothing but the size of the graph.
    """
    middle, tails = range(1, 13), range(13, 25)
    hub = 0
    contacts = [Contact(hub, pid) for pid in middle] + list(map(Contact, middle, tails))
    town = Town({pid: Person(age=pid) for pid in (hub, *middle, *tails)}, tuple(contacts))
    changed = rows_changed_by_leaving(town, hub, lambda contacts: capped_by_rank(contacts, 1), tmp_path)
    assert len(changed) > 2 * (2 * 1 + 1)


def test_ordered_insertion_is_no_bound(tmp_path):
    """Contacts are taken one after the other, each if both ends have fewer than D so far.

    Why this is not offered: on a path with D = 1, taken in order, every other contact stays. When the first person
    leaves, it is the others that stay, and every row of the path changes.
    """
    town = Town({pid: Person(age=pid) for pid in range(20)}, tuple(Contact(pid, pid + 1) for pid in range(19)))
    changed = rows_changed_by_leaving(town, 0, lambda contacts: inserted_in_order(contacts, 1), tmp_path)
    assert len(changed) == 20


@dataclasses.dataclass
class World:
    """A town and what is drawn to change it."""

    generator: np.random.Generator
    degree: int
    town: Town
    folder: Path
    options: dict

    def rows(self, town, rule, num_windows=WINDOWS):
        """The rows and how many of them may change."""
        changes = {**self.options, "num_windows": num_windows, "validation_fraction": 0, "num_shards": 1}
        rows, job = rows_of(town, self.folder, degree_bound=rule, **changes)
        assert job.row_influence is not None
        return rows, job.row_influence.num_rows

    def own(self, pid, num_windows=WINDOWS):
        return own_names(pid, num_windows)

    def replaced(self, pid, keeps_promise, **same):
        """The town with another person, of the same silo, who has met others."""
        others = without(self.town, pid)
        person = random_person(
            self.generator,
            **{"region": self.town.people[pid].region, "hid": int(self.generator.integers(1, 5)), **same},
        )
        choices = [
            other
            for other in self.generator.permutation(list(others.people)).tolist()
            if other != pid and (not keeps_promise or self._may_meet(others, pid, other))
        ]
        met = choices[: 2 * self.degree] if keeps_promise else choices
        neighbours = [other for other in met if self.town.people[other].region == person.region]
        allowed = set(met) - set(neighbours[self.degree :]) if keeps_promise else set(met)
        contacts = [self.contact(pid, other) for other in met if other in allowed]
        return dataclasses.replace(
            others, people={**others.people, pid: person}, contacts=(*others.contacts, *contacts)
        )

    def contact(self, first, second):
        return random_contact(self.generator, first, second)

    def _may_meet(self, town, pid, other):
        return degree_of(town, other) < self.degree or town.people[pid].region != town.people[other].region


def check(before, after, bound, silos, own):
    """How many training rows differ, the own ones included, if these are no more than may, and of no other silo."""
    assert {name: (row.client, row.split) for name, row in before.items() if row.split == "train"} == {
        name: (row.client, row.split) for name, row in after.items() if row.split == "train"
    }
    difference = train_difference(before, after)
    assert {before[name].client for name in difference} <= silos
    changed = difference | own if silos else difference
    assert len(changed) <= bound
    # Tests have one row for each person, to which the same argument applies.
    test_names = [name for name, row in before.items() if row.split == "test"]
    assert sum(before[name].x != after[name].x for name in test_names if name in after) <= bound // WINDOWS
    return len(changed)


def train_difference(before, after):
    return {name for name, row in before.items() if row.split == "train" and row != after[name]}


def own_names(pid, num_windows):
    windows = np.arange(num_windows)
    return {name.decode() for name in hexadecimal_names(0, "row", np.full(num_windows, pid), windows)}


def random_town(generator, degree):
    """Seven people in one silo and five in the other, each of whom met up to `degree` people of its silo."""
    people = {
        pid: random_person(
            generator,
            region=SILOS[place % 12 >= 7],
            hid=1 + place % 4,
            school=("a", "b")[place % 2],
        )
        for place, pid in enumerate(generator.choice(10**6, 12, replace=False).tolist())
    }
    town = Town(people, (), {hid: 3 for hid in range(1, 5)})
    pairs = list(itertools.combinations(people, 2))
    for place in generator.permutation(len(pairs)).tolist():
        first, second = pairs[place]
        is_inside = people[first].region == people[second].region
        if is_inside and max(degree_of(town, first), degree_of(town, second)) >= degree:
            continue
        if is_inside or generator.random() < 0.3:
            number = generator.integers(1, 3)
            contacts = tuple(random_contact(generator, first, second) for _ in range(number))
            town = dataclasses.replace(town, contacts=(*town.contacts, *contacts))
    return town


def degree_of(town, pid):
    people = town.people
    met = {other for contact in town.contacts if pid in contact.ends for other in contact.ends - {pid}}
    return sum(people[other].region == people[pid].region for other in met)


def without(town, pid):
    """The town after somebody has left: nobody has met them."""
    return dataclasses.replace(town, contacts=tuple(contact for contact in town.contacts if pid not in contact.ends))


def rows_changed_by_leaving(town, pid, project, folder):
    """Names of the rows that differ when contacts are first left out by a projection, the own ones included."""
    projected = [
        rows_of(dataclasses.replace(place, contacts=tuple(project(place.contacts))), folder, validation_fraction=0)[0]
        for place in (town, without(town, pid))
    ]
    return train_difference(*projected) | own_names(pid, 1)


def capped_by_rank(contacts, degree):
    met = {}
    for contact in contacts:
        met.setdefault(contact.pid1, []).append(contact.pid2)
        met.setdefault(contact.pid2, []).append(contact.pid1)

    def priority(own, other):
        return int(keyed_uint64(0, "contacts", np.array([own]), np.array([other]))[0])

    kept = {pid: sorted(others, key=lambda other: priority(pid, other))[:degree] for pid, others in met.items()}
    return [c for c in contacts if c.pid2 in kept[c.pid1] and c.pid1 in kept[c.pid2]]


def inserted_in_order(contacts, degree):
    number, taken = {}, []
    for contact in contacts:
        if all(number.get(pid, 0) < degree for pid in contact.ends):
            taken.append(contact)
            number.update({pid: number.get(pid, 0) + 1 for pid in contact.ends})
    return taken
