"""Simulates an outbreak on contacts day by day, and writes the tables that a forecast learns from and is judged by.

Everyone is susceptible (S), infectious (I) or recovered (R), and a contact with someone infectious infects with
probability 1 - exp(-rate * hours of contact that day), independently of other contacts. A person who spends h hours in
all with infectious people is thus infected with probability 1 - exp(-rate * h): one draw a person and day. The draw is
a function of seed, person and day, and hours are summed as whole seconds, so that nothing depends on the order of rows.
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

# Seconds are summed as int32, which is 68 years: with 49 people, 17 months without a break.
_MOST_SECONDS = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Contacts:
    """How long any two people meet.

    Attributes:
      pids: `[people]` int64, ascending.
      seconds: `[people, people]` int32, the sum of a pair's durations, either above or below the diagonal.
      observed_days: the days that durations are totals of.
    """

    pids: NDArray[np.int64]
    seconds: "scipy.sparse.csr_matrix"
    observed_days: int = 1

    def seconds_with(self, group: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Returns the seconds that each person spends with people of a group, one by one: int32 `[people]`."""
        members = group.astype(np.int32)
        return self.seconds @ members + self.seconds.T @ members


def read_contacts(folder: Path) -> Contacts:
    """Reads the tables person and population_network; 12 bytes a contact row while reading, 20 at the end of it.

    Raises:
      DataError: a table is missing or malformed, a pid occurs twice in person or not at all, or a duration is negative
        or too large.
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
    # One column after the other, so that only one of them is in memory twice.
    total = sum(int(part.sum(dtype=np.int64)) for part in durations)
    columns = []
    for parts in (durations, firsts, seconds):
        columns.append(_concatenate(parts).astype(np.int32, copy=False))
        parts.clear()
    # Late: it takes long to import, and options are read without it.
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
      seed: keys every draw; same options and tables, same outbreak.
      initial_infections: how many people are infectious on day 0; None for one in 5,000, and at least five (or all).
      transmission_rate: infections an hour of contact; None to derive it from `reproduction_number`.
      reproduction_number: how many people one infectious person infects if it has the mean hours of contact with
        people who are all susceptible, each contact for itself; contacts that meet often, and people with more
        contacts than others, make the real number another one.
      infectious_days: mean number of days from infection to recovery.
      fixed_duration: everyone recovers after exactly `infectious_days`, which must then be whole; otherwise with
        probability 1 / infectious_days every day.
      observed_days: days of `disease_outcome_training`.
      target_days: days after these, in which `target` looks for infections.
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
            raise ValueError(f"infectious_days {self.infectious_days} must be whole with fixed_duration")


@dataclasses.dataclass(frozen=True)
class OutbreakSummary:
    """The course of an outbreak.

    Attributes:
      num_people: how many people there are.
      transmission_rate: infections an hour of contact.
      daily_infections: people that became infectious on each day, observed or not; on day 0 from outside.
      num_targets: how many people have `infected` 1 in table `target`.
    """

    num_people: int
    transmission_rate: float
    daily_infections: tuple[int, ...]
    num_targets: int

    @property
    def attack_rate(self) -> float:
        """Returns the share of people that were infected on any day."""
        return sum(self.daily_infections) / self.num_people

    @property
    def peak_day(self) -> int:
        """Returns the day after day 0 with most infections; the first of several."""
        return 1 + int(np.argmax(self.daily_infections[1:]))

    def text(self) -> str:
        """Returns the summary in words."""
        return (
            f"{self.transmission_rate:.4g} infections an hour of contact; "
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
    """Reads person and population_network, writes disease_outcome_training and target.

    Args:
      folder: the folder of the population.
      options: of the outbreak.
      output: folder to write to; None for the population's own.
      table_format: of the tables written.
      sparse: leave out rows of state S, so that a day without a row means S.
      overwrite: replace the tables.

    Raises:
      DataError: a table is missing or malformed, a contact is of nobody in person, or a table to write exists.
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
    """Yields the states of all people, `[people]` int8, on each of the observed and target days.

    An infection or a recovery of a day shows in the next day's states. `rate` is in infections an hour of contact.

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
    """Returns infections an hour of contact, as given or by the reproduction number; 0 where nobody meets."""
    if options.transmission_rate is not None:
        return options.transmission_rate
    # Each contact is one of both people.
    mean_seconds = 2.0 * float(contacts.seconds.data.sum(dtype=np.int64)) / max(len(contacts.pids), 1)
    hours = mean_seconds / _SECONDS_PER_HOUR / contacts.observed_days
    return options.reproduction_number / (hours * options.infectious_days) if hours else 0.0


def uniform(seed: int, purpose: int, day: int, pids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Draws from [0, 1) that depend on the arguments alone, each person's on its own pid.

    The mixing function is that of SplitMix64 (Steele, Lea and Flood, 2014, doi 10.1145/2714064.2660195).
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
