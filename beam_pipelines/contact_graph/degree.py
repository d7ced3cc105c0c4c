"""Bounds how many rows one person, or one pair's contacts, can change; privacy plans build on the bound and its proof.

A person's row is a function of the person, of its contacts with people of its own silo, and of these people. The
contacts that fill the row's slots depend on nobody else (`beam_pipelines.contact_graph.sampling`), so a row changes
only if its own person, one of its contacts or one of the people at their other ends does.

All bounds assume that these are public: people's silo, group and household, the sizes of households, the number of
people, and the number of days that durations are divided by (`observed_days`). They also assume that neighbouring
graphs are well-formed: people whose rows cannot be read or conflict, and people whose days of disease contradict each
other (not S, I, R in this order), are left out, which changes the number of rows. A job that refuses input with too
many bad rows reveals one bit about the input.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import DataError
from tff_pdp.settings import Count, CountOrZero, Settings


class _Bound(Settings):
    """A bound that depends neither on degrees nor on groups."""

    group_column: ClassVar[str | None] = None

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """Returns the bound, where everybody has a row for each of some windows in time, and a row has some slots."""
        raise NotImplementedError

    def check_degrees(self, degrees: np.ndarray, people: np.ndarray) -> None:
        """Checks how many people have been met, int64 `[n]`, by people of ids int64 `[n]`; raises DataError."""

    def check_groups(self, sizes: np.ndarray) -> None:
        """Checks the sizes of groups, int64 `[groups]`; raises DataError for one that is too large."""


class DegreePromise(_Bound, tag_field="kind", tag="promise", omit_defaults=True):
    """Nobody has met more than D people: a public promise, checked when rows are made.

    Guarantee: let u be a person. Rows that u can change are u's own and those of the people u has met, at most D:
      D + 1 if u leaves (`replace_special`: u's row is one of zeros, u is in no other row). If u becomes somebody else
      with other contacts (`replace_one`), rows of the people met before and after change, D each: 2 D + 1.
    Assumes: D was chosen without looking at the data, and both graphs keep the promise. A job that refuses rows
      reveals that the promise is broken.

    Attributes:
      max_degree: D, of different people anybody has met within its silo.
      adjacency: how neighbouring graphs differ.
    """

    max_degree: CountOrZero
    adjacency: Literal["replace_one", "replace_special"] = "replace_one"

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """Returns the bound; see `_Bound`."""
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
        """Refuses people who have met too many."""
        excess = np.flatnonzero(degrees > self.max_degree)
        if len(excess):
            raise DataError(
                f"degree_bound: person {people[excess[0]]} has met {degrees[excess[0]]} people of its silo, and "
                f"{self.max_degree} are promised (max_degree). Rows would not be as private as promised: promise more, "
                "or use kind public_groups or edge"
            )


class PublicGroups(_Bound, tag_field="kind", tag="public_groups", omit_defaults=True):
    """Contacts outside of public groups, such as households, wards or school classes, are left out.

    Guarantee: whatever u does, only rows of u's group change, u's own among them: at most B.
    Assumes: who belongs to which group is public, as is B.

    Attributes:
      group_column: of table `person` (or `household`): equal for people of one group.
      max_group_size: B.
    """

    group_column: Annotated[str, Meta(pattern=r"^(person|household)\.\w+$")]
    max_group_size: Count

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """Returns the bound; see `_Bound`."""
        return RowInfluence(
            "node",
            "replace_one",
            num_windows * (self.max_group_size if num_slots else 1),
            f"contacts outside of groups by {self.group_column} are left out, and these public groups have at most "
            f"{self.max_group_size} people" + _times(num_windows),
        )

    def check_groups(self, sizes: np.ndarray) -> None:
        """Refuses groups that are too large."""
        if sizes.max(initial=0) > self.max_group_size:
            raise DataError(
                f"degree_bound: a group by {self.group_column} has {sizes.max()} people, more than max_group_size "
                f"{self.max_group_size}: allow larger groups, or name another group_column"
            )


class EdgeLevel(_Bound, tag_field="kind", tag="edge", omit_defaults=True):
    """Protects which pairs have met, and when; not people, whose own features and states are then not hidden.

    Guarantee: all contacts of a pair are in the rows of these two people and in no other: two rows change.
    """

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """Returns the bound; see `_Bound`."""
        return RowInfluence(
            "edge",
            "add_or_remove_one",
            2 * num_windows if num_slots else 0,
            "the contacts of a pair are in the rows of these two people only" + _times(num_windows),
        )


DegreeBound = DegreePromise | PublicGroups | EdgeLevel


def _times(num_windows: int) -> str:
    return f"; everybody has {num_windows} rows" if num_windows > 1 else ""
