"""Bounds how many rows one person, or one pair's contacts, can change; privacy plans build on the bound and its proof.

A person's row is a function of the person, of the person's contacts within the silo, and of the people met. The choice
of contacts for the row's slots depends on nobody else (`beam_pipelines.contact_graph.sampling`). So a row changes only
if the row's person, one of the person's contacts, or one of the people met changes. The guarantees below count one row
for each person; with `num_windows` rows each, the numbers are multiplied by `num_windows`.

All bounds assume that the following is public: people's silo, group and household, the sizes of households, the number
of people, and the number of days that durations are divided by (`observed_days`). All bounds also assume that
neighbouring graphs are well-formed. In other graphs, a person is left out, and the number of rows changes, if the
person's rows are unreadable or conflicting, or the person's disease states are not in the order S, I, R. A job that
refuses input with too many bad rows reveals one bit about the input.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import DataError
from tff_pdp.settings import Count, CountOrZero, Settings


class _Bound(Settings):
    """Bound that depends neither on degrees nor on groups."""

    group_column: ClassVar[str | None] = None

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """Returns the bound for people with `num_windows` rows each, and rows with `num_slots` slots."""
        raise NotImplementedError

    def check_degrees(self, degrees: np.ndarray, people: np.ndarray) -> None:
        """Checks the degrees, int64 `[n]`, of people with ids int64 `[n]`; raises DataError if one is too large."""

    def check_groups(self, sizes: np.ndarray) -> None:
        """Checks the sizes of groups, int64 `[groups]`; raises DataError if one is too large."""


class DegreePromise(_Bound, tag_field="kind", tag="promise", omit_defaults=True):
    """Public promise that nobody has met more than D people; a job checks the promise when it makes rows.

    Guarantee: person u can change u's own row and the rows of the people that u has met, at most D. With
      `replace_special`, u leaves: u's row is all zeros and u is in no other row, so D + 1 rows change. With
      `replace_one`, u becomes somebody else with other contacts. Then 2 D + 1 rows change: u's row, the rows of at most
      D people met before, and the rows of at most D people met after.
    Assumes: D was chosen without looking at the data, and both graphs keep the promise. A job that refuses rows
      reveals that the promise is broken.

    Attributes:
      max_degree: D, the largest number of different people that anybody has met within the person's silo.
      adjacency: how neighbouring graphs differ. `replace_one`: a person becomes somebody else, with other contacts;
        `replace_special`: a person leaves, and the row is all zeros.
    """

    max_degree: CountOrZero
    adjacency: Literal["replace_one", "replace_special"] = "replace_one"

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """Returns the bound on the rows that one person can change."""
        degree = self.max_degree if num_slots else 0
        people = 2 * degree + 1 if self.adjacency == "replace_one" else degree + 1
        return RowInfluence(
            "node",
            self.adjacency,
            num_windows * people,
            f"nobody has met more than {degree} people of the own silo, which is promised in public and checked"
            + _times(num_windows),
        )

    def check_degrees(self, degrees: np.ndarray, people: np.ndarray) -> None:
        """Raises DataError if somebody has met more than `max_degree` people."""
        excess = np.flatnonzero(degrees > self.max_degree)
        if len(excess):
            raise DataError(
                f"degree_bound: person {people[excess[0]]} has met {degrees[excess[0]]} people of the same silo, more "
                f"than the promised max_degree {self.max_degree}. Rows would be less private than promised: raise "
                "max_degree, or use kind public_groups or edge"
            )


class PublicGroups(_Bound, tag_field="kind", tag="public_groups", omit_defaults=True):
    """Leaves out contacts between different public groups, such as households, wards or school classes.

    Guarantee: person u can change only the rows of u's group, at most B rows including u's own row.
    Assumes: the group of every person is public, and so is B.

    Attributes:
      group_column: column whose value the people of a group share, written `person.<column>` or `household.<column>`.
      max_group_size: B, the largest number of people in a group.
    """

    group_column: Annotated[str, Meta(pattern=r"^(person|household)\.\w+$")]
    max_group_size: Count

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """Returns the bound on the rows that one person can change."""
        return RowInfluence(
            "node",
            "replace_one",
            num_windows * (self.max_group_size if num_slots else 1),
            f"contacts outside of groups by {self.group_column} are left out, and these public groups have at most "
            f"{self.max_group_size} people" + _times(num_windows),
        )

    def check_groups(self, sizes: np.ndarray) -> None:
        """Raises DataError if a group has more than `max_group_size` people."""
        if sizes.max(initial=0) > self.max_group_size:
            raise DataError(
                f"degree_bound: a group by {self.group_column} has {sizes.max()} people, more than max_group_size "
                f"{self.max_group_size}: raise max_group_size, or name another group_column"
            )


class EdgeLevel(_Bound, tag_field="kind", tag="edge", omit_defaults=True):
    """Protects whether and when two people have met. People's features and states are not protected.

    Guarantee: all contacts of a pair are in the rows of these two people and in no other row, so two rows change.
    """

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """Returns the bound on the rows that the contacts of one pair can change."""
        return RowInfluence(
            "edge",
            "add_or_remove_one",
            2 * num_windows if num_slots else 0,
            "the contacts of a pair are in the rows of these two people only" + _times(num_windows),
        )


DegreeBound = DegreePromise | PublicGroups | EdgeLevel


def _times(num_windows: int) -> str:
    return f"; everybody has {num_windows} rows" if num_windows > 1 else ""
