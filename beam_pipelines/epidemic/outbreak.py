"""Simulates an outbreak on contacts day by day, and writes the tables for training and testing a forecast.

Everyone is susceptible (S), infectious (I) or recovered (R). A contact with an infectious person infects with
probability 1 - exp(-rate * hours of contact that day), independently of other contacts. So a person with a total of h
hours with infectious people is infected with probability 1 - exp(-rate * h): one draw per person and day. The draw is a
function of seed, person and day, and hours are summed as whole seconds, so nothing depends on the order of rows.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pyarrow as pa
from msgspec import Meta
from numpy.typing import NDArray
from tqdm import tqdm

from beam_pipelines.contact_graph.input_tables import read_table
from beam_pipelines.contact_graph.people import PlaceLookup
from beam_pipelines.contact_graph.tables import STATE_NAMES, read_observed_days
from beam_pipelines.epidemic.table_writer import TableFormat, TableWriter
from beam_pipelines.keyed_hash import mix
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import Count, CountOrZero, NotNegative, Settings

if TYPE_CHECKING:
    import scipy.sparse

# Seconds are summed as int32, up to 68 years: with 49 people, 17 months without a break.
_MOST_SECONDS = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Contacts:
    """Total duration of the contacts of each pair of people.

    Attributes:
      pids: ids of people, int64 `[people]`, ascending.
      seconds: total seconds of each pair, int32 `[people, people]`: the seconds of people i and j are the sum of the
        entries (i, j) and (j, i).
      observed_days: number of days over which durations are summed.
    """

    pids: NDArray[np.int64]
    seconds: "scipy.sparse.csr_matrix"
    observed_days: int = 1

    def seconds_with(self, group: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Returns int32 `[people]`: each person's total seconds with the members of `group`, a bool mask `[people]`."""
        members = group.astype(np.int32)
        return self.seconds @ members + self.seconds.T @ members


def read_contacts(folder: Path) -> Contacts:
    """Reads the tables person and population_network; needs up to 20 bytes of memory for each contact row.

    Raises:
      DataError: a table is missing or malformed, a pid occurs twice in person, a contact's pid is not in person, or a
        duration is negative or too large.
    """
    pids = np.sort(_concatenate([rows["pid"] for rows in read_table(folder, "person", ["pid"])]))
    repeated = pids[1:][pids[1:] == pids[:-1]]
    if len(repeated):
        raise DataError(f"{folder}: table person: pid {repeated[0]} occurs more than once")
    if len(pids) > np.iinfo(np.int32).max:
        raise DataError(
            f"{folder}: table person: {len(pids)} people; at most {np.iinfo(np.int32).max} can be simulated"
        )
    lookup = PlaceLookup.of(pids)
    firsts, seconds, durations = [], [], []
    with tqdm(desc="read contacts", unit="row", unit_scale=True) as bar:
        for rows in read_table(folder, "population_network", ["pid1", "pid2", "duration"]):
            for name, places in (("pid1", firsts), ("pid2", seconds)):
                places.append(lookup.places(rows[name]))
                unknown = rows[name][places[-1] < 0]
                if len(unknown):
                    raise DataError(f"{folder}: table population_network: pid {unknown[0]} is not in table person")
            durations.append(rows["duration"])
            if len(durations[-1]) and durations[-1].min() < 0:
                raise DataError(f"{folder}: table population_network: duration {durations[-1].min()} is negative")
            bar.update(len(rows["duration"]))
    matrix = _sum_of_pairs(len(pids), firsts, seconds, durations)
    if matrix is None or _most_seconds(matrix) > _MOST_SECONDS:
        raise DataError(f"{folder}: table population_network: someone has more than {_MOST_SECONDS} seconds of contact")
    return Contacts(pids, matrix, read_observed_days(folder))


def _sum_of_pairs(
    num_people: int, firsts: list[NDArray], seconds: list[NDArray], durations: list[NDArray]
) -> "scipy.sparse.csr_matrix | None":
    """Adds up each pair's durations; None if a sum does not fit."""
    # The columns are joined one by one, so that only one column is in memory twice.
    total = sum(int(part.sum(dtype=np.int64)) for part in durations)
    columns = []
    for parts in (durations, firsts, seconds):
        columns.append(_concatenate(parts).astype(np.int32, copy=False))
        parts.clear()
    # Imported late: the import is slow, and reading options does not need it.
    import scipy.sparse

    data, row, column = columns
    del columns
    matrix = scipy.sparse.coo_matrix((data, (row, column)), (num_people, num_people), copy=False).tocsr()
    # A sum that does not fit wraps around, which makes it smaller.
    return matrix if matrix.data.sum(dtype=np.int64) == total else None


def _most_seconds(matrix: "scipy.sparse.csr_matrix") -> float:
    totals = matrix.sum(axis=0, dtype=np.float64).A1 + matrix.sum(axis=1, dtype=np.float64).A1
    return totals.max(initial=0.0)


def _concatenate(parts: list[NDArray]) -> NDArray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


SUSCEPTIBLE, INFECTIOUS, RECOVERED = range(3)

_START, _INFECTION, _RECOVERY = range(3)
_SECONDS_PER_HOUR = 3600.0
_MASK = (1 << 64) - 1


class OutbreakOptions(Settings):
    """Settings of a simulated outbreak.

    Attributes:
      seed: seed of every draw; the same options and tables give the same outbreak.
      initial_infections: number of people infectious on day 0; None for 1 in 5,000 people, but at least 5 people (or
        all, if there are fewer).
      transmission_rate: infections per hour of contact; None to derive the rate from `reproduction_number`.
      reproduction_number: number of people that one infectious person with the mean hours of contact would infect, if
        all others were susceptible and all contacts were with different people. The real number differs, as contacts
        repeat and some people have more contacts than others.
      infectious_days: mean number of days from infection to recovery.
      fixed_duration: make everyone recover after exactly `infectious_days`, a whole number; by default people recover
        with probability 1 / infectious_days every day.
      observed_days: number of days in table `disease_outcome_training`.
      target_days: number of days after the observed days; table `target` states who is infected on these days.
    """

    seed: CountOrZero = 0
    initial_infections: CountOrZero | None = None
    transmission_rate: NotNegative | None = None
    reproduction_number: NotNegative = 2.0
    infectious_days: Annotated[float, Meta(ge=1, le=1e6)] = 7.0
    fixed_duration: bool = False
    observed_days: Count = 57
    target_days: Count = 7

    def __post_init__(self) -> None:
        if self.fixed_duration and self.infectious_days != int(self.infectious_days):
            raise ValueError(f"infectious_days {self.infectious_days} must be whole with fixed_duration true")


@dataclasses.dataclass(frozen=True)
class OutbreakSummary:
    """Course of an outbreak.

    Attributes:
      num_people: number of people.
      transmission_rate: infections per hour of contact.
      daily_infections: number of people who became infectious on each observed and target day; on day 0, the initial
        infections.
      num_targets: number of people with `infected` 1 in table `target`.
    """

    num_people: int
    transmission_rate: float
    daily_infections: tuple[int, ...]
    num_targets: int

    @property
    def attack_rate(self) -> float:
        """Returns the share of people who were infected on any day."""
        return sum(self.daily_infections) / self.num_people

    @property
    def peak_day(self) -> int:
        """Returns the day with the most infections, day 0 excluded; the first such day if there are several."""
        return 1 + int(np.argmax(self.daily_infections[1:]))

    def text(self) -> str:
        """Returns the summary in words."""
        return (
            f"{self.transmission_rate:.4g} infections per hour of contact; "
            f"{100 * self.attack_rate:.1f}% of {self.num_people:,} people infected in {len(self.daily_infections)} "
            f"days, most of them ({max(self.daily_infections[1:]):,}) on day {self.peak_day}; target: "
            f"{self.num_targets:,} infected after the observed days ({100 * self.num_targets / self.num_people:.2f}%)"
        )


def simulate_outbreak(
    folder: Path,
    options: OutbreakOptions,
    output: Path | None = None,
    table_format: TableFormat | None = None,
    sparse: bool = False,
    overwrite: bool = False,
) -> OutbreakSummary:
    """Simulates an outbreak on the tables person and population_network; writes disease_outcome_training and target.

    Args:
      folder: folder of the population.
      options: settings of the outbreak.
      output: folder to write the tables into; None for the population's folder.
      table_format: format of the written tables.
      sparse: whether to leave out rows with state S, so that a day without a row means S.
      overwrite: whether to replace tables that exist.

    Raises:
      DataError: a table is missing or malformed, a contact's pid is not in person, or a table to write exists and
        `overwrite` is false.
      ConfigError: there are more initial infections than people.
    """
    output = output or folder
    with contextlib.ExitStack() as stack:
        states_table, target_table = (
            stack.enter_context(TableWriter(output, name, table_format, overwrite))
            for name in ("disease_outcome_training", "target")
        )
        contacts = read_contacts(folder)
        rate = transmission_rate(contacts, options)
        num_days = options.observed_days + options.target_days
        days = tqdm(simulate(contacts, rate, options), total=num_days, desc="simulate", unit="day")
        infections, before = [], np.full(len(contacts.pids), SUSCEPTIBLE, np.int8)
        last_observed = before
        for day, states in enumerate(days):
            infections.append(int(np.count_nonzero((before == SUSCEPTIBLE) & (states != SUSCEPTIBLE))))
            before = states
            if day < options.observed_days:
                last_observed = states
                _write_states(states_table, day, contacts.pids, states, sparse)
        infected = (last_observed == SUSCEPTIBLE) & (before != SUSCEPTIBLE)
        target_table.write({"pid": contacts.pids, "infected": infected})
    return OutbreakSummary(len(contacts.pids), rate, tuple(infections), int(np.count_nonzero(infected)))


def simulate(contacts: Contacts, rate: float, options: OutbreakOptions) -> Iterator[NDArray[np.int8]]:
    """Yields the states of all people, int8 `[people]`, on each of the observed and target days.

    An infection or a recovery shows in the states of the next day. `rate` is in infections per hour of contact.

    Raises:
      ConfigError: there are more initial infections than people.
    """
    pids = contacts.pids
    states = np.full(len(pids), SUSCEPTIBLE, np.int8)
    states[_first_infections(pids, options)] = INFECTIOUS
    since = np.zeros(len(pids), np.int32)
    rate_per_second = rate / _SECONDS_PER_HOUR / contacts.observed_days
    for day in range(options.observed_days + options.target_days):
        yield states.copy()
        ill = np.flatnonzero(states == INFECTIOUS)
        if not len(ill):
            continue
        seconds = contacts.seconds_with(states == INFECTIOUS)
        exposed = np.flatnonzero((states == SUSCEPTIBLE) & (seconds > 0))
        chance = -np.expm1(-rate_per_second * seconds[exposed])
        infected = exposed[uniform(options.seed, _INFECTION, day, pids[exposed]) < chance]
        if options.fixed_duration:
            recovers = day + 1 - since[ill] >= options.infectious_days
        else:
            recovers = uniform(options.seed, _RECOVERY, day, pids[ill]) < 1.0 / options.infectious_days
        states[infected] = INFECTIOUS
        since[infected] = day + 1
        states[ill[recovers]] = RECOVERED


def transmission_rate(contacts: Contacts, options: OutbreakOptions) -> float:
    """Returns the infections per hour of contact, stated in `options` or derived from the reproduction number.

    The derived number is 0 if nobody meets.
    """
    if options.transmission_rate is not None:
        return options.transmission_rate
    # Each contact counts for both people.
    mean_seconds = 2.0 * float(contacts.seconds.data.sum(dtype=np.int64)) / max(len(contacts.pids), 1)
    hours = mean_seconds / _SECONDS_PER_HOUR / contacts.observed_days
    return options.reproduction_number / (hours * options.infectious_days) if hours else 0.0


def uniform(seed: int, purpose: int, day: int, pids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Draws a number from [0, 1) for each person; the number depends only on seed, purpose, day and pid.

    The mixing function is SplitMix64's (Steele, Lea and Flood, 2014, doi 10.1145/2714064.2660195).
    """
    key = 0
    for part in (seed, purpose, day):
        key = int(mix(np.array([(key + part) & _MASK], np.uint64))[0])
    bits = mix(mix(pids.astype(np.uint64)) ^ np.uint64(key))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _first_infections(pids: NDArray[np.int64], options: OutbreakOptions) -> NDArray[np.intp]:
    count = options.initial_infections
    if count is None:
        count = min(len(pids), max(5, len(pids) // 5000))
    if count > len(pids):
        raise ConfigError(f"initial_infections {count}: there are only {len(pids)} people")
    return np.argsort(uniform(options.seed, _START, 0, pids), kind="stable")[:count]


def _write_states(
    table: TableWriter, day: int, pids: NDArray[np.int64], states: NDArray[np.int8], sparse: bool
) -> None:
    if sparse:
        rows = np.flatnonzero(states != SUSCEPTIBLE)
        pids, states = pids[rows], states[rows]
    named = pa.DictionaryArray.from_arrays(pa.array(states), pa.array(STATE_NAMES))
    table.write({"day": np.full(len(pids), day, np.int32), "pid": pids, "state": named})
