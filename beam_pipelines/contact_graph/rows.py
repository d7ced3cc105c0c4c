"""Defines how people become rows, and computes the numbers in a row, each from 0 to 1 and stored as a byte.

A row describes the days before the row's start. The layout `slots` has a block for each sampled contact, as in the
winning entry of the US/UK PETs challenge (Liu, CMU-RI-TR-23-17, 2023, section 2.3). `summary` has the mean of these
blocks over all slots, empty slots included, and for each day the time spent with infectious people. `exposure` has ten
numbers: how many contacts were infectious in the last days, and how long the person met these contacts. The fewer
numbers a row has, the less the noise on gradients hides the signal.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from beam_pipelines.contact_graph.degree import DegreeBound
from beam_pipelines.contact_graph.people import PERSON_FEATURES, SECONDS_PER_DAY, People, to_bytes
from beam_pipelines.contact_graph.sampling import Pairs
from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES
from beam_pipelines.options import JobOptions
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.settings import Count, CountOrZero, Settings

NUM_CLASSES = 2
# The source of rows of people, as manifests name it.
SOURCE = "contact_graph"
MOST_CONTACTS = 20
# Numbers of days. The ranges overlap on purpose: nearly equal numbers share a weight's noise.
_LATELY = (1, 2, 3, 5, 7)
_EDGE_FEATURES = ("hours", "number_of_contacts", "start", *(f"at_{name}" for name in ACTIVITY_NAMES))


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Layout of the numbers in a row.

    Attributes:
      kind: `slots`, `summary` or `exposure`.
      num_slots: S, the number of sampled contacts; 0 for rows without contacts, whatever the kind.
      window_days: number of days of history.
      observed_days: number of days over which durations of contacts are summed.
    """

    kind: str
    num_slots: int
    window_days: int
    observed_days: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the numbers in a row."""
        days = range(-self.window_days, 0)
        history = [f"infectious_day{day}" for day in days] + [f"recovered_day{day}" for day in days]
        own = [*PERSON_FEATURES, "share_of_slots", "always_susceptible", *history]
        block = ["present", *PERSON_FEATURES, *_EDGE_FEATURES, *history]
        if not self.num_slots:
            return tuple(own)
        if self.kind == "exposure":
            return tuple(
                f"{what}_last{span}" for what in ("contacts_infectious", "hours_with_infectious") for span in self.spans
            )
        if self.kind == "summary":
            exposure = [f"hours_with_infectious_day{day}" for day in days]
            return (*own, *(f"contacts_{name}" for name in block), *exposure)
        return (*own, *(f"contact{slot}_{name}" for slot in range(self.num_slots) for name in block))

    @property
    def spans(self) -> tuple[int, ...]:
        """Returns the lengths, in days before the row's start, of the periods over which exposures are averaged."""
        return tuple(span for span in _LATELY if span <= self.window_days)

    @property
    def size(self) -> int:
        """Returns how many numbers a row has."""
        return len(self.names)


class RowSettings(Settings):
    """Settings of how people become rows.

    Attributes:
      degree_bound: bound on the rows that one person can change; see `beam_pipelines.contact_graph.degree`.
      silo_by: how people are assigned to silos: by `person.<column>`, by `household.<column>`, or by
        `residence_grid.<degrees>`, the grid cell that a person's home lies in. Contacts between silos are left out.
      num_slots: S, the number of contacts in a row; 0 for rows without contacts.
      layout: numbers in a row; see `beam_pipelines.contact_graph.rows`. `slots` has a block of numbers for each
        contact, `summary` has the mean of the blocks, and `exposure` has ten numbers about infectious contacts.
      num_days: number of observed days, from day 0.
      window_days: number of days of history in a row.
      prediction_days: number of days after a row's history; the label is whether the person falls ill on these days.
        The history of a test row ends with the last observed day; table `target` states the row's label.
      num_windows: number of rows per person in training and validation, each with its own randomly drawn window in
        time. The number of rows that one person can change grows in proportion to `num_windows`.
    """

    degree_bound: DegreeBound
    silo_by: Annotated[str, Meta(pattern=r"^((person|household)\.\w+|residence_grid\.\d+(\.\d+)?)$")] = "person.region"
    num_slots: CountOrZero = 20
    layout: Literal["slots", "summary", "exposure"] = "slots"
    num_days: Annotated[int, Meta(ge=2, lt=2**15 - 1)] = 57
    window_days: Count = 21
    prediction_days: Count = 7
    num_windows: Count = 1

    def __post_init__(self):
        kind, _, size = self.silo_by.partition(".")
        if kind == "residence_grid" and not float(size) > 0:
            raise ValueError(f"silo_by {self.silo_by}: the side of a cell must be more than 0 degrees")
        if self.window_days + self.prediction_days > self.num_days:
            raise ValueError("num_days must be at least window_days + prediction_days")

    def layout_of(self, observed_days: int = 1) -> RowLayout:
        """Returns the layout of a row; durations of contacts are sums over `observed_days` days."""
        return RowLayout(self.layout, self.num_slots, self.window_days, observed_days)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContactGraphOptions(JobOptions):
    """Options of the contact-graph job.

    Attributes:
      rows: how people become rows.
      validation_fraction: expected share of people whose rows are for validation.
      min_people_per_silo: smallest number of people in a silo; smaller silos are left out.
      num_shards: number of shard files; with 0, the job derives the number from the number of contacts. A task has the
        contacts of one shard in memory.
    """

    rows: RowSettings
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    min_people_per_silo: Count = 10
    num_shards: Annotated[int, Meta(ge=0, le=2**16)] = 0

    def parameters(self) -> dict[str, Any]:
        """Returns one mapping with the parameters that every job has and the settings of rows."""
        own = super().parameters()
        return {
            name: value for key in own for name, value in (own[key].items() if key == "rows" else [(key, own[key])])
        }


@dataclasses.dataclass(frozen=True)
class RowRules:
    """Rules for people, silos and rows that every stage of the job gets.

    Attributes:
      options: options of the job.
      columns: names of the columns to read, by table.
      has_households: whether there is a table of households.
      layout: layout of a row.
      features: shape and types of the written examples.
      num_shards: number of shards of the dataset, and of partitions of people.
    """

    options: ContactGraphOptions
    columns: Mapping[str, tuple[str, ...]]
    has_households: bool
    layout: RowLayout
    features: FeatureSpec
    num_shards: int

    @property
    def grid_degrees(self) -> float | None:
        """Returns the side of a grid cell in degrees, or None if silos are not made by a grid."""
        kind, _, size = self.options.rows.silo_by.partition(".")
        return float(size) if kind == "residence_grid" else None


def build_rows(
    layout: RowLayout, people: People, first: int, degrees: np.ndarray, pairs: Pairs, starts: np.ndarray
) -> np.ndarray:
    """Builds the rows of consecutive people: uint8 `[n, layout.size]`.

    Args:
      layout: layout of a row.
      people: all people of the population.
      first: place of the first person with a row.
      degrees: number of people that each person has met, int64 `[n]`.
      pairs: sampled contacts of these n people, sorted by `owner` (counted from `first`); `other` is a place.
      starts: first day after each row's history, int64 `[n]`.
    """
    own = slice(first, first + len(starts))
    history = _History(layout.window_days)
    own_days = history.of(people.infected[own], people.recovered[own], starts)
    blocks = [
        people.features[own],
        to_bytes(np.minimum(degrees, layout.num_slots) / max(layout.num_slots, 1))[:, np.newaxis],
        to_bytes(people.infected[own].astype(np.int64) >= starts)[:, np.newaxis]
        & to_bytes(people.recovered[own].astype(np.int64) >= starts)[:, np.newaxis],
        own_days,
    ]
    if not layout.num_slots:
        return np.concatenate(blocks, axis=1)
    if layout.kind == "exposure":
        is_susceptible = blocks[2] > 0
        return _exposures(layout, people, pairs, starts, history) * is_susceptible
    if layout.kind == "summary":
        return np.concatenate([*blocks, *_summaries(layout, people, pairs, starts, history)], axis=1)
    return _with_slots(layout, blocks, people, pairs, starts, history)


def _with_slots(
    layout: RowLayout, own: list[np.ndarray], people: People, pairs: Pairs, starts: np.ndarray, history: "_History"
) -> np.ndarray:
    rows = np.zeros((len(starts), layout.size), np.uint8)
    width = sum(block.shape[1] for block in own)
    np.concatenate(own, axis=1, out=rows[:, :width])
    slots = rows[:, width:].reshape(len(starts), layout.num_slots, -1)
    # The values are assigned through views: the reshape must not have copied.
    assert np.shares_memory(slots, rows)
    begin = 0
    for block in _contact_blocks(layout, people, pairs, starts, history):
        slots[pairs.owner, pairs.slot, begin : begin + block.shape[1]] = block
        begin += block.shape[1]
    return rows


def _summaries(
    layout: RowLayout, people: People, pairs: Pairs, starts: np.ndarray, history: "_History"
) -> Iterator[np.ndarray]:
    blocks = np.concatenate(list(_contact_blocks(layout, people, pairs, starts, history)), axis=1)
    yield to_bytes(_sums(blocks, pairs.owner, len(starts)) / (255.0 * layout.num_slots))
    infectious = blocks[:, -2 * layout.window_days : -layout.window_days] > 0
    yield to_bytes(_sums(infectious * _share_of_day(layout, pairs), pairs.owner, len(starts)))


def _exposures(layout: RowLayout, people: People, pairs: Pairs, starts: np.ndarray, history: "_History") -> np.ndarray:
    """Returns the shares of slots and of the day with infectious people, means over last days: uint8 `[n, 2 * spans]`.

    The result holds square roots: most contacts are short, and numbers close to zero are lost in noise.
    """
    days = history.of(people.infected[pairs.other], people.recovered[pairs.other], starts[pairs.owner])
    infectious = days[:, : layout.window_days] > 0
    shares_of_slots = _sums(infectious / np.float32(layout.num_slots), pairs.owner, len(starts))
    shares_of_day = _sums(infectious * _share_of_day(layout, pairs), pairs.owner, len(starts))
    means = [
        np.minimum(shares, 1.0)[:, -span:].mean(axis=1)
        for shares in (shares_of_slots, shares_of_day)
        for span in layout.spans
    ]
    return to_bytes(np.sqrt(np.stack(means, axis=1)))


def _share_of_day(layout: RowLayout, pairs: Pairs) -> np.ndarray:
    """Returns the mean share of a day that each pair spends together: float32 `[pairs, 1]`."""
    share = np.minimum(pairs.duration / layout.observed_days / SECONDS_PER_DAY, 1.0)
    return share[:, np.newaxis].astype(np.float32)


def _contact_blocks(
    layout: RowLayout, people: People, pairs: Pairs, starts: np.ndarray, history: "_History"
) -> Iterator[np.ndarray]:
    """Yields parts of the numbers of each pair, in the order of `RowLayout.names`: uint8 `[pairs, ...]`."""
    yield np.full((len(pairs.owner), 1), 255, np.uint8)
    yield people.features[pairs.other]
    daily = 1 / layout.observed_days
    numbers = (
        pairs.duration * daily / SECONDS_PER_DAY,
        pairs.count * daily / MOST_CONTACTS,
        pairs.start / SECONDS_PER_DAY,
    )
    yield np.stack([to_bytes(values) for values in numbers], axis=1)
    flags = np.unpackbits(pairs.activities[:, np.newaxis], axis=1, bitorder="little")[:, : len(ACTIVITY_NAMES)]
    yield flags * np.uint8(255)
    yield history.of(people.infected[pairs.other], people.recovered[pairs.other], starts[pairs.owner])


class _History:
    """Table of the days before a row's start on which a person was infectious or recovered."""

    def __init__(self, window_days: int):
        self._days = window_days
        day = np.arange(window_days)
        ill, well = np.meshgrid(np.arange(window_days + 1), np.arange(window_days + 1), indexing="ij")
        is_infectious = (day >= ill[..., np.newaxis]) & (day < well[..., np.newaxis])
        is_recovered = np.broadcast_to(day >= well[..., np.newaxis], is_infectious.shape)
        table = np.concatenate([is_infectious, is_recovered], axis=2).astype(np.uint8) * np.uint8(255)
        self._table = table.reshape(-1, 2 * window_days)

    def of(self, infected: np.ndarray, recovered: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Returns infectious and recovered flags of people by day: uint8 `[n, 2 * window_days]`, 0 or 255."""
        origin = starts - self._days
        ill = np.clip(infected.astype(np.int64) - origin, 0, self._days)
        well = np.clip(recovered.astype(np.int64) - origin, 0, self._days)
        return np.take(self._table, ill * (self._days + 1) + well, axis=0)


def _sums(values: np.ndarray, owners: np.ndarray, num_owners: int) -> np.ndarray:
    """Adds up the rows of each owner, for sorted owners: float64 `[owners, ...]`."""
    total = np.zeros((num_owners, values.shape[1]))
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    total[owners[first]] = np.add.reduceat(values, first, axis=0, dtype=np.float64)
    return total
