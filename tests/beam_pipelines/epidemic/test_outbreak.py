"""Outbreaks agree with a plain loop over people and contacts, and with what can be worked out by hand."""

import collections
import itertools
import math

import numpy as np
import pyarrow.parquet
import pytest

from beam_pipelines.contact_graph.tables import write_about
from beam_pipelines.epidemic.outbreak import (
    OutbreakOptions,
    read_contacts,
    simulate,
    simulate_outbreak,
    transmission_rate,
    uniform,
)
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import read_settings

# Not a range, not in order, and far apart: places are not ids.
PIDS = [10**6 + 7 * (number * 37 % 60) for number in range(60)]
# Infections an hour: nobody escapes a minute of it.
CERTAIN = 1e9


@pytest.fixture
def write_population(tmp_path):
    def write(pids, contacts, observed_days=1):
        (tmp_path / "person.csv").write_text("pid\n" + "".join(f"{pid}\n" for pid in pids))
        rows = "".join(f"{first},{second},{duration}\n" for first, second, duration in contacts)
        (tmp_path / "population_network.csv").write_text("pid1,pid2,duration\n" + rows)
        write_about(tmp_path, {"observed_days": observed_days})
        return tmp_path

    return write


@pytest.mark.parametrize("fixed_duration", [False, True])
# Pids that are wide apart are searched for, others looked up.
@pytest.mark.parametrize("spread", [1, 10**6])
def test_agrees_with_a_loop(write_population, fixed_duration, spread):
    generator = np.random.default_rng(1)
    pids = [pid * spread for pid in PIDS]
    contacts = [
        (*(pids[place] for place in generator.choice(60, 2, replace=False)), int(generator.integers(1, 9000)))
        for _ in range(300)
    ]
    options = OutbreakOptions(
        seed=3,
        initial_infections=3,
        transmission_rate=0.06,
        infectious_days=4,
        fixed_duration=fixed_duration,
        observed_days=20,
    )
    read = read_contacts(write_population(pids, contacts, observed_days=2))
    assert read.pids.tolist() == sorted(pids)
    days = [
        dict(zip(sorted(pids), "".join("SIR"[s] for s in day), strict=True)) for day in simulate(read, 0.06, options)
    ]
    expected = loop_over_people(pids, contacts, 2, options)
    assert days == expected
    final = collections.Counter(expected[-1].values())
    assert min(final["S"], final["R"]) > 5, "an outbreak that reaches nobody or everybody shows little"


def test_same_contacts_in_another_order_give_the_same_outbreak(write_population):
    generator = np.random.default_rng(2)
    contacts = [(*generator.choice(PIDS, 2, replace=False).tolist(), 3000 + row) for row in range(300)]
    options = OutbreakOptions(transmission_rate=0.025)
    first = np.array(list(simulate(read_contacts(write_population(PIDS, contacts)), 0.025, options)))
    turned = [(second, first, duration) for first, second, duration in contacts[::-1]]
    again = np.array(list(simulate(read_contacts(write_population(PIDS[::-1], turned)), 0.025, options)))
    assert (first == again).all()
    assert 5 < (first[-1] == 0).sum() < 50


def test_certain_infection_takes_one_step_a_day(write_population):
    pids = list(range(100, 110))
    line = [(first, second, 60) for first, second in itertools.pairwise(pids)]
    contacts = read_contacts(write_population(pids, line))
    options = OutbreakOptions(
        initial_infections=1, transmission_rate=CERTAIN, infectious_days=3, fixed_duration=True, observed_days=10
    )
    states = np.array(list(simulate(contacts, CERTAIN, options)))
    (start,) = np.flatnonzero(states[0])
    for day, place in itertools.product(range(17), range(10)):
        infected_on = abs(place - start)
        expected = 0 if day < infected_on else 1 if day < infected_on + 3 else 2
        assert states[day, place] == expected


def test_nobody_is_infected_at_rate_zero(write_population):
    folder = write_population(range(6), [(first, second, 9000) for first in range(6) for second in range(first)])
    summary = simulate_outbreak(folder, OutbreakOptions(initial_infections=2, transmission_rate=0.0))
    assert summary.daily_infections == (2, *[0] * 63) and summary.num_targets == 0
    assert summary.attack_rate == 2 / 6


def test_tables_say_what_happened(write_population, tmp_path):
    pids = list(range(1, 201))
    line = [(first, second, 60) for first, second in itertools.pairwise(pids)]
    folder = write_population(pids, line)
    options = OutbreakOptions(initial_infections=1, transmission_rate=CERTAIN, infectious_days=2, fixed_duration=True)
    summary = simulate_outbreak(folder, options, output=tmp_path / "dense")
    rows = read(tmp_path / "dense", "disease_outcome_training")
    assert len(rows) == 57 * 200 and {row["day"] for row in rows} == set(range(57))
    by_person = collections.defaultdict(str)
    for row in rows:
        by_person[row["pid"]] += row["state"]
    (start,) = [pid for pid, states in by_person.items() if states[0] == "I"]
    for pid, states in by_person.items():
        steps = abs(pid - start)
        assert states == ("S" * steps + "II" + "R" * 57)[:57]
    # The wave reaches people 57 to 63 steps away on the days of the target.
    expected = {pid: int(57 <= abs(pid - start) <= 63) for pid in pids}
    assert {row["pid"]: row["infected"] for row in read(tmp_path / "dense", "target")} == expected
    assert summary.num_targets == sum(expected.values()) >= 7
    assert summary.attack_rate == sum(abs(pid - start) <= 63 for pid in pids) / 200
    assert summary.peak_day == 1 and summary.daily_infections[:2] == (1, 2)
    simulate_outbreak(folder, options, output=tmp_path / "sparse", sparse=True)
    assert read(tmp_path / "sparse", "disease_outcome_training") == [row for row in rows if row["state"] != "S"]
    assert read(tmp_path / "sparse", "target") == read(tmp_path / "dense", "target")


def test_rate_follows_from_the_reproduction_number(write_population):
    # 2 * (3600 + 7200) seconds of three people are 2 hours each; in 4 days, half an hour a day.
    contacts = read_contacts(write_population([1, 2, 3], [(1, 2, 3600), (2, 3, 7200)], observed_days=4))
    options = OutbreakOptions(reproduction_number=3.0, infectious_days=5.0)
    assert transmission_rate(contacts, options) == pytest.approx(3.0 / (0.5 * 5.0))
    assert transmission_rate(contacts, OutbreakOptions(transmission_rate=0.25)) == 0.25
    assert transmission_rate(read_contacts(write_population([1, 2], [])), options) == 0.0


def test_draws_are_split_mix_of_seed_purpose_day_and_person():
    pids = np.array([0, 1, 5, 2**62], np.int64)
    expected = [python_uniform(9, 1, 30, pid) for pid in pids.tolist()]
    assert uniform(9, 1, 30, pids).tolist() == expected
    draws = uniform(0, 1, 0, np.arange(100_000))
    # The mean of n uniform draws has standard deviation 1 / sqrt(12 n).
    assert abs(draws.mean() - 0.5) < 5 / math.sqrt(12 * len(draws))
    others = [
        uniform(1, 1, 0, np.arange(100_000)),
        uniform(0, 2, 0, np.arange(100_000)),
        draws[::-1],
        np.roll(draws, 1),
    ]
    assert all(abs(np.corrcoef(draws, other)[0, 1]) < 0.02 for other in others)
    # The first output of the published generator with state 0.
    assert python_mix(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize(
    ("pids", "contacts", "message"),
    [
        ([1, 2, 2], [], "pid 2 occurs more than once"),
        ([1, 2], [(1, 3, 5)], "pid 3 is not in table person"),
        ([1, 10**9], [(1, 3, 5)], "pid 3 is not in table person"),
        ([], [(1, 3, 5)], "pid 1 is not in table person"),
        ([1, 2], [(1, 2, -5)], "duration -5 is negative"),
        ([1, 2], [(1, 2, 2**31 - 1), (1, 2, 1)], "more than 2147483647 seconds"),
        ([1, 2, 3], [(1, 2, 2**31 - 1), (3, 1, 1)], "more than 2147483647 seconds"),
    ],
)
def test_bad_populations_are_named(write_population, pids, contacts, message):
    with pytest.raises(DataError, match=message):
        read_contacts(write_population(pids, contacts))


def test_impossible_options_are_named(write_population):
    folder = write_population([1, 2], [(1, 2, 60)])
    with pytest.raises(ConfigError, match="initial_infections 3: there are only 2 people"):
        simulate_outbreak(folder, OutbreakOptions(initial_infections=3))
    assert not list(folder.glob("*disease*")) and not list(folder.glob(".*"))
    for name, value in [
        ("seed", -1),
        ("initial_infections", -1),
        ("transmission_rate", -0.1),
        ("reproduction_number", math.inf),
        ("infectious_days", 0.5),
        ("observed_days", 0),
        ("target_days", 0),
    ]:
        with pytest.raises(ConfigError, match=f"outbreak.{name} must be a .*, not {value}"):
            read_settings(OutbreakOptions, {name: value}, "experiment.yaml", "outbreak")
    with pytest.raises(ConfigError, match=r"outbreak: infectious_days 2\.5 must be whole"):
        read_settings(OutbreakOptions, {"infectious_days": 2.5, "fixed_duration": True}, "experiment.yaml", "outbreak")


def loop_over_people(pids, contacts, observed_days, options):
    """The states of everyone on every day, person by person and contact by contact."""
    states = dict.fromkeys(pids, "S")
    infected_on = {}
    for pid in sorted(pids, key=lambda pid: python_uniform(options.seed, 0, 0, pid))[: options.initial_infections]:
        states[pid], infected_on[pid] = "I", 0
    days = []
    for day in range(options.observed_days + options.target_days):
        days.append(dict(states))
        following = dict(states)
        for pid in pids:
            if states[pid] == "S":
                escapes = 1.0
                for first, second, duration in contacts:
                    other = second if first == pid else first if second == pid else None
                    if other is not None and states[other] == "I":
                        escapes *= math.exp(-options.transmission_rate * duration / 3600 / observed_days)
                if python_uniform(options.seed, 1, day, pid) < 1 - escapes:
                    following[pid], infected_on[pid] = "I", day + 1
            elif states[pid] == "I":
                if options.fixed_duration:
                    recovers = day + 1 == infected_on[pid] + options.infectious_days
                else:
                    recovers = python_uniform(options.seed, 2, day, pid) < 1 / options.infectious_days
                following[pid] = "R" if recovers else "I"
        states = following
    return days


def python_uniform(seed, purpose, day, pid):
    key = 0
    for part in (seed, purpose, day):
        key = python_mix((key + part) % 2**64)
    return (python_mix(python_mix(pid) ^ key) >> 11) / 2**53


def python_mix(state):
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def read(folder, table):
    return pyarrow.parquet.read_table(folder / f"{table}.parquet").to_pylist()
