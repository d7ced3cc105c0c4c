"""Made-up populations: complete and consistent tables, bounds that hold exactly, and the same for the same seed."""

import collections
import itertools

import numpy as np
import pyarrow.parquet
import pytest
from msgspec.structs import asdict, replace

from beam_pipelines.contact_graph.tables import HOME
from beam_pipelines.epidemic.community import keep_within_bound
from beam_pipelines.epidemic.population import PopulationOptions, generate_population
from beam_pipelines.epidemic.table_writer import TableFormat
from tff_pdp.errors import ConfigError
from tff_pdp.settings import read_settings

OPTIONS = PopulationOptions(num_people=3000, contact_rows_per_person=12.0, num_regions=3, seed=5, community_size=400)
TABLES = (
    "person",
    "household",
    "residence_locations",
    "activity_locations",
    "population_network",
    "activity_location_assignment",
)


@pytest.fixture(scope="module")
def population(tmp_path_factory):
    folder = tmp_path_factory.mktemp("population")
    summary = generate_population(folder, OPTIONS)
    return summary, {name: read(folder, name) for name in TABLES}


def test_people_live_in_households_and_regions(population):
    summary, tables = population
    person, household = tables["person"], tables["household"]
    assert person["pid"].tolist() == list(range(1, 3001))
    assert collections.Counter(person["region"]) == {"region-00": 1000, "region-01": 1000, "region-02": 1000}
    members = collections.Counter(person["hid"].tolist())
    assert members == dict(zip(household["hid"].tolist(), household["hh_size"].tolist(), strict=True))
    assert summary.num_households == len(members) and set(members.values()) == {1, 2, 3, 4, 5, 6}
    assert set(tables["residence_locations"]["rlid"]) == set(members)
    numbers = collections.defaultdict(list)
    for hid, number in zip(person["hid"].tolist(), person["person_number"].tolist(), strict=True):
        numbers[hid].append(number)
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
    assert person["age"].min() >= 0 and person["age"].max() <= 95 and set(person["sex"].tolist()) == {1, 2}
    assert person["age"][person["person_number"] == 1].min() >= 20


def test_contacts_are_of_two_people_at_a_place_and_within_the_day(population):
    summary, tables = population
    network = tables["population_network"]
    # Six communities of 375 ... 400 people; all of them can reach 12 rows a person exactly.
    assert summary.num_contacts == len(network["pid1"]) == 36_000
    for name in ("pid1", "pid2"):
        assert network[name].min() >= 1 and network[name].max() <= 3000
    assert not (network["pid1"] == network["pid2"]).any()
    counts = np.bincount(np.concatenate([network["pid1"], network["pid2"]]))
    assert summary.most_contacts == counts.max() > 4 * 24
    places = set(tables["activity_locations"]["alid"].tolist()) | set(tables["household"]["hid"].tolist())
    assert set(network["lid"].tolist()) <= places
    assert network["start_time"].min() >= 0 and network["duration"].min() > 0
    assert (network["start_time"] + network["duration"]).max() <= 86400
    assert set(network["activity1"].tolist()) == set(range(1, 8)) == set(network["activity2"].tolist())
    region = tables["person"]["region"]
    # 6% of contacts are between any two people, two thirds of whom are of different regions.
    crossing = np.mean([region[a - 1] != region[b - 1] for a, b in zip(network["pid1"], network["pid2"], strict=True)])
    assert 0.03 < crossing < 0.05


def test_households_meet_at_home(population):
    _, tables = population
    person, network = tables["person"], tables["population_network"]
    members = collections.defaultdict(list)
    for pid, hid in zip(person["pid"].tolist(), person["hid"].tolist(), strict=True):
        members[hid].append(pid)
    expected = sorted((*pair, hid) for hid, pids in members.items() for pair in itertools.combinations(pids, 2))
    home = network["activity1"] == HOME
    assert sorted(zip(*(network[name][home].tolist() for name in ("pid1", "pid2", "lid")), strict=True)) == expected


def test_everyone_stays_at_home_and_visits_places_of_the_activity(population):
    _, tables = population
    assignment, places = tables["activity_location_assignment"], tables["activity_locations"]
    home = assignment["activity_type"] == HOME
    assert sorted(assignment["pid"][home].tolist()) == list(range(1, 3001))
    names = {2: "work", 3: "shopping", 4: "other", 5: "school", 6: "college", 7: "religion"}
    flags = {alid: row for row, alid in enumerate(places["alid"].tolist())}
    for activity, name in names.items():
        visited = assignment["lid"][assignment["activity_type"] == activity].tolist()
        assert visited and all(places[name][flags[lid]] == 1 for lid in visited)
    age = dict(zip(tables["person"]["pid"].tolist(), tables["person"]["age"].tolist(), strict=True))
    assert {age[pid] for pid in assignment["pid"][assignment["activity_type"] == 5].tolist()} == set(range(5, 18))


@pytest.mark.parametrize("bound", [1, 3, 4, 8, 20])
def test_nobody_meets_more_people_than_the_bound(tmp_path, bound):
    generate_population(tmp_path, replace(OPTIONS, max_contacts=bound))
    network = read(tmp_path, "population_network")
    met = collections.defaultdict(set)
    for first, second in zip(network["pid1"].tolist(), network["pid2"].tolist(), strict=True):
        met[first].add(second)
        met[second].add(first)
    most = max(map(len, met.values()))
    # Someone gets near to it: there is no slack but the rounds of travel that a person sat out.
    assert bound - bound // 2 <= most <= bound
    assert len(network["pid1"]) > 500


def test_bound_keeps_pairs_that_are_early_for_both_people():
    # Person 0 meets 1, 2 (twice) and 3; person 3 also meets 4 first.
    first, second = np.array([3, 0, 2, 0, 0]), np.array([4, 1, 0, 2, 3])
    assert keep_within_bound(first, second, 5, 1).tolist() == [True, True, False, False, False]
    assert keep_within_bound(first, second, 5, 2).tolist() == [True, True, True, True, False]
    assert keep_within_bound(first, second, 5, 3).tolist() == [True] * 5


def test_bound_agrees_with_a_loop():
    generator = np.random.default_rng(0)
    first = generator.integers(0, 30, 600)
    second = (first + generator.integers(1, 30, 600)) % 30
    met = [[] for _ in range(30)]
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        if b not in met[a]:
            met[a].append(b)
            met[b].append(a)
    expected = [
        met[a].index(b) < 7 and met[b].index(a) < 7 for a, b in zip(first.tolist(), second.tolist(), strict=True)
    ]
    assert keep_within_bound(first, second, 30, 7).tolist() == expected and 0 < sum(expected) < 600


def test_seed_decides(tmp_path):
    def network(name, seed, table_format=None):
        generate_population(tmp_path / name, replace(OPTIONS, seed=seed), table_format)
        return (tmp_path / name / "population_network.parquet").read_bytes()

    assert network("first", 5) == network("second", 5) != network("third", 6)


def test_assignments_can_be_left_out(tmp_path):
    generate_population(tmp_path, replace(OPTIONS, assignments=False), TableFormat("csv"))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{name}.csv" for name in TABLES[:-1]} | {"about.json"}


def test_small_populations_work(tmp_path):
    options = PopulationOptions(num_people=4, contact_rows_per_person=2.0, num_regions=2)
    generate_population(tmp_path, options)
    network = read(tmp_path, "population_network")
    assert not (network["pid1"] == network["pid2"]).any()
    assert read(tmp_path, "person")["pid"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_people": 5},
        {"num_regions": 0},
        {"contact_rows_per_person": 1.0},
        {"contact_rows_per_person": float("nan")},
        {"max_contacts": 0},
        {"community_size": 1},
        {"seed": -1},
    ],
)
def test_impossible_options_are_named(changes):
    with pytest.raises(ConfigError, match=rf"population(\.|: ){next(iter(changes))} "):
        read_settings(PopulationOptions, {**asdict(OPTIONS), **changes}, "experiment.yaml", "population")


def read(folder, table):
    columns = pyarrow.parquet.read_table(folder / f"{table}.parquet")
    return {name: np.array(columns[name].to_pylist()) for name in columns.column_names}
