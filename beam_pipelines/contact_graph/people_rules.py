"""What decides what people of a contact graph are like, and where they belong."""

import dataclasses
from collections.abc import Mapping

from beam_pipelines.contact_graph.degree import DegreeBound

# What silos are called; elsewhere they are numbers.
SILO_NAMES = "silo_names"


@dataclasses.dataclass(frozen=True)
class PeopleRules:
    """What decides what people are like and where they belong.

    Attributes:
      columns: by table, the columns that are read.
      silo_by: `person.<column>`, `household.<column>`, or `residence_grid.<degrees>`.
      degree_bound: may name groups.
      validation_fraction: expected share of people whose rows are for validation.
      min_people: silos with fewer people are dropped.
      num_days: how many days were observed, from day 0.
      num_windows: how many rows each person has for training or validation.
      has_households: whether there is a table of them.
      seed: keys the split.
      num_partitions: of people.
    """

    columns: Mapping[str, tuple[str, ...]]
    silo_by: str
    degree_bound: DegreeBound
    validation_fraction: float
    min_people: int
    num_days: int
    num_windows: int
    has_households: bool
    seed: int
    num_partitions: int

    @property
    def grid_degrees(self) -> float | None:
        """The side of a cell of the grid that silos are made by, if they are."""
        kind, _, size = self.silo_by.partition(".")
        return float(size) if kind == "residence_grid" else None
