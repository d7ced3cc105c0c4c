"""Generates a population of any size and its contacts, community by community, as tables of `contact_graph.tables`."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
from msgspec import Meta
from numpy.typing import NDArray
from tqdm import tqdm

from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, HOME, OTHER, write_about
from beam_pipelines.epidemic import community as communities
from beam_pipelines.epidemic.community import Columns, Community
from beam_pipelines.epidemic.table_writer import TableFormat, TableWriter
from tff_pdp.settings import Count, CountOrZero, Settings, to_plain

_TRAVEL_SHARE = 0.06
_TRAVEL_STREAM = 1 << 32
# The ids of places begin above the ids of homes, which are ids of people.
_FIRST_PLACE = 10**10
_PLACES_PER_COMMUNITY = 10**6
_HOUR = 3600


class PopulationOptions(Settings):
    """Settings of a generated population.

    Attributes:
      num_people: number of people.
      contact_rows_per_person: number of rows of `population_network` divided by the number of people. A row is a
        contact of two people, so the mean number of contacts of a person is twice this number.
      num_regions: number of values of `region` in table `person`; regions have about the same number of people.
      seed: seed of everything; the same options give the same tables.
      max_contacts: largest number of different people that anybody meets; None for no bound. Contacts beyond the bound
        are left out, so there are fewer rows than `contact_rows_per_person` says.
      community_size: largest number of people in a community; memory grows with this number, about 10 kB a person.
      assignments: whether to write `activity_location_assignment`, about three rows a person.
    """

    num_people: Count
    contact_rows_per_person: Annotated[float, Meta(ge=2, le=1000)] = 24.5
    num_regions: Count = 4
    seed: CountOrZero = 0
    max_contacts: Count | None = None
    community_size: Annotated[int, Meta(ge=2, le=_PLACES_PER_COMMUNITY)] = 50_000
    assignments: bool = True

    def __post_init__(self) -> None:
        if self.num_people < 2 * self.num_regions:
            raise ValueError(f"num_people {self.num_people}: {self.num_regions} regions need at least 2 people each")


@dataclasses.dataclass(frozen=True)
class PopulationSummary:
    """Size of a population; `most_contacts` is the largest number of contact rows that one person takes part in."""

    num_people: int
    num_households: int
    num_contacts: int
    most_contacts: int

    def text(self) -> str:
        """Returns the summary in words."""
        return (
            f"{self.num_people:,} people in {self.num_households:,} households with {self.num_contacts:,} contacts "
            f"(each of two people; a person takes part in {2 * self.num_contacts / self.num_people:.1f} on average, "
            f"and in {self.most_contacts:,} at most)"
        )


def generate_population(
    folder: Path, options: PopulationOptions, table_format: TableFormat | None = None, overwrite: bool = False
) -> PopulationSummary:
    """Writes the tables person, household, both location tables, population_network and, optionally, assignments.

    People are numbered 1, 2, ...; people of a community have consecutive numbers, and so have people of a region. Most
    contacts are within a community; about 6% are between people of the whole population.

    Raises:
      DataError: the folder has one of the tables, and `overwrite` is false.
    """
    tables = ["person", "household", "residence_locations", "activity_locations", "population_network"]
    tables += ["activity_location_assignment"] * options.assignments
    contacts_of_person = np.zeros(options.num_people, np.int32)
    with contextlib.ExitStack() as stack:
        write = {name: stack.enter_context(TableWriter(folder, name, table_format, overwrite)) for name in tables}
        bar = stack.enter_context(tqdm(total=options.num_people, desc="generate", unit="person", unit_scale=True))
        travel = _Travel.of(options)
        for town in _towns(options):
            generator = np.random.default_rng([options.seed, town.number])
            people = communities.make_community(town.first_pid, town.num_people, generator)
            _write_people(write, people, town, options, generator)
            contacts = _meet(people, town, travel, options, generator)
            _write_contacts(write["population_network"], contacts, people, town)
            for member in (contacts["member1"], contacts["member2"]):
                np.add.at(contacts_of_person, member + (town.first_pid - 1), 1)
            bar.update(town.num_people)
    write_about(folder, {"observed_days": 1, "generated_by": to_plain(options)})
    num_rows = {name: writer.num_rows for name, writer in write.items()}
    most_contacts = int(contacts_of_person.max())
    return PopulationSummary(options.num_people, num_rows["household"], num_rows["population_network"], most_contacts)


@dataclasses.dataclass(frozen=True)
class _Town:
    """Place of a community in the population."""

    number: int
    region: int
    first_pid: int
    num_people: int


def _towns(options: PopulationOptions) -> Iterator[_Town]:
    number = 0
    for region in range(options.num_regions):
        first, last = (options.num_people * edge // options.num_regions for edge in (region, region + 1))
        count = math.ceil((last - first) / options.community_size)
        edges = [first + (last - first) * edge // count for edge in range(count + 1)]
        for start, end in itertools.pairwise(edges):
            yield _Town(number, region, 1 + start, end - start)
            number += 1


@dataclasses.dataclass(frozen=True)
class _Travel:
    """Contacts across communities: in each of several rounds, person i may meet person (factor * i + step) mod people.

    A round is a permutation, so nobody meets more than two people in a round, and each community's contacts are known
    without the other communities.
    """

    rounds: list[tuple[int, int]]
    chance: float
    num_people: int

    @classmethod
    def of(cls, options: PopulationOptions) -> "_Travel":
        generator = np.random.default_rng([options.seed, _TRAVEL_STREAM])
        mean = _TRAVEL_SHARE * options.contact_rows_per_person
        wanted = math.ceil(mean)
        # Travel may use half of the bound, and in each round a person meets at most two people.
        count = wanted if options.max_contacts is None else min(wanted, options.max_contacts // 4)
        rounds = []
        while len(rounds) < count:
            factor, step = (int(draw) for draw in generator.integers(1, options.num_people, 2))
            if math.gcd(factor, options.num_people) == 1:
                rounds.append((factor, step))
        return cls(rounds, mean / wanted, options.num_people)

    def meet(self, town: _Town, generator: np.random.Generator) -> tuple[NDArray, NDArray]:
        """Returns members of the town and the people they meet, by position from the town's first person."""
        members, partners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        positions = town.first_pid - 1 + np.arange(town.num_people)
        for factor, step in self.rounds:
            met = (positions * factor + step) % self.num_people
            goes = (generator.random(town.num_people) < self.chance) & (met != positions)
            members.append(np.flatnonzero(goes))
            partners.append(met[goes] - (town.first_pid - 1))
        return np.concatenate(members), np.concatenate(partners)


def _meet(
    people: Community, town: _Town, travel: _Travel, options: PopulationOptions, generator: np.random.Generator
) -> Columns:
    travellers, met = travel.meet(town, generator)
    at_home = communities.meet_at_home(people, generator)
    wanted = round(options.contact_rows_per_person * town.num_people)
    num_rows = max(0, wanted - len(travellers) - len(at_home["member1"]))
    at_places = communities.meet_at_places(people, num_rows, generator)
    local = {name: np.concatenate([at_home[name], at_places[name]]) for name in at_home}
    if options.max_contacts is not None:
        bound = options.max_contacts - 2 * len(travel.rounds)
        keep = communities.keep_within_bound(local["member1"], local["member2"], town.num_people, bound)
        local = {name: column[keep] for name, column in local.items()}
    activity = np.full(len(travellers), OTHER)
    start_time, duration = communities.draw_times(activity, generator)
    places = people.places["place"][people.places["activity"] == OTHER]
    away = {
        "member1": travellers,
        "member2": met,
        "place": places[generator.integers(0, len(places), len(travellers))],
        "start_time": start_time,
        "duration": duration,
        "activity1": activity,
        "activity2": activity,
    }
    return {name: np.concatenate([local[name], away[name]]) for name in local}


def _write_contacts(writer: TableWriter, contacts: Columns, people: Community, town: _Town) -> None:
    pid1, pid2 = contacts["member1"] + town.first_pid, contacts["member2"] + town.first_pid
    home = people.person["hid"][contacts["member1"]]
    lid = np.where(contacts["place"] < 0, home, _place_ids(contacts["place"], town))
    writer.write({**contacts, "pid1": pid1, "pid2": pid2, "lid": lid})


def _write_people(
    write: dict[str, TableWriter],
    people: Community,
    town: _Town,
    options: PopulationOptions,
    generator: np.random.Generator,
) -> None:
    names = pa.array([f"region-{number:02d}" for number in range(options.num_regions)])
    region = pa.DictionaryArray.from_arrays(pa.array(np.full(town.num_people, town.region, np.int32)), names)
    write["person"].write({**people.person, "region": region})
    hid, size = np.unique(people.person["hid"], return_counts=True)
    write["household"].write({"hid": hid, "hh_size": size})
    write["residence_locations"].write({"rlid": hid, **_coordinates(town, len(hid), generator)})
    activity = people.places["activity"]
    flags = {name: activity == 1 + ACTIVITY_NAMES.index(name) for name in ACTIVITY_NAMES[1:]}
    coordinates = _coordinates(town, len(activity), generator)
    write["activity_locations"].write({"alid": _place_ids(people.places["place"], town), **coordinates, **flags})
    if options.assignments:
        _write_assignments(write["activity_location_assignment"], people, town, generator)


def _write_assignments(writer: TableWriter, people: Community, town: _Town, generator: np.random.Generator) -> None:
    pid, hid = people.person["pid"], people.person["hid"]
    visits = people.visits
    start_time, duration = communities.draw_times(visits["activity"], generator)
    night = np.zeros(len(pid), np.int64)
    columns = {
        "pid": [pid, visits["member"] + town.first_pid],
        "lid": [hid, _place_ids(visits["place"], town)],
        "activity_type": [night + HOME, visits["activity"]],
        "start_time": [night, start_time],
        "duration": [night + generator.integers(6 * _HOUR, 8 * _HOUR, len(pid)), duration],
    }
    writer.write({name: np.concatenate(parts) for name, parts in columns.items()})


def _place_ids(places: NDArray, town: _Town) -> NDArray:
    return _FIRST_PLACE + town.number * _PLACES_PER_COMMUNITY + places


def _coordinates(town: _Town, count: int, generator: np.random.Generator) -> Columns:
    # Regions are one degree apart, communities of a region a tenth of a degree.
    center = np.array([town.region, 0.1 * (town.number % 10)])
    longitude, latitude = (center + 0.05 * generator.standard_normal((count, 2))).T.round(5)
    return {"longitude": longitude, "latitude": latitude}
