"""How many rows one person, or one pair's contacts, can change: the bound that privacy plans build on, and its proof.

A person's row is a function of the person, of its contacts with people of its own silo, and of these people. Which
contacts fill the row's slots depends on nobody else (`beam_pipelines.contact_graph.sampling`), so a row changes only if
its own person, one of its contacts or one of the people at their other ends does.

All of the bounds assume that these are public: which silo, group and household people belong to, how large households
are, how many people there are, and the number of days that durations are divided by (`observed_days`). They also assume
that neighbouring graphs are well-formed: people whose rows cannot be read or conflict, and people whose days of disease
contradict each other (not S, I, R in this order), are left out, which changes how many rows there are. A job
that refuses input of which too much is bad says one bit about it.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import DataError
from tff_pdp.settings import Count, CountOrZero, Settings


class DegreePromise(Settings, tag_field="kind", tag="promise", omit_defaults=True):
    """Nobody has met more than D people: a public promise, checked when rows are made.

    Guarantee: let u be a person. Rows that u can change are u's own and those of the people u has met, at most D:
      D + 1 if u leaves (`replace_special`: u's row is one of zeros, u is in no other row). If u becomes somebody else
      with other contacts (`replace_one`), rows of the people met before and after change, D each: 2 D + 1.
    Assumes: D was chosen without looking at the data, and both graphs keep the promise. That rows are refused where
      they do not reveals so.

    Attributes:
      max_degree: D, of different people anybody has met within its silo.
      adjacency: how neighbouring graphs differ.
    """

    max_degree: CountOrZero
    adjacency: Literal["replace_one", "replace_special"] = "replace_one"

    group_column: ClassVar[str | None] = None

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """The bound, where everybody has a row for each of some windows in time, and a row has some slots."""
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
        """Raises a DataError for the first person, of ids int64 `[n]`, that has met too many: int64 `[n]`."""
        excess = np.flatnonzero(degrees > self.max_degree)
        if len(excess):
            raise DataError(
                f"degree_bound: person {people[excess[0]]} has met {degrees[excess[0]]} people of its silo, and "
                f"{self.max_degree} are promised (max_degree). Rows would not be as private as promised: promise more, "
                "or use kind public_groups or edge"
            )

    def check_groups(self, sizes: np.ndarray) -> None:
        """Nothing: groups play no part."""


class PublicGroups(Settings, tag_field="kind", tag="public_groups", omit_defaults=True):
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
        """The bound, where everybody has a row for each of some windows in time, and a row has some slots."""
        return RowInfluence(
            "node",
            "replace_one",
            num_windows * (self.max_group_size if num_slots else 1),
            f"contacts outside of groups by {self.group_column} are left out, and these public groups have at most "
            f"{self.max_group_size} people" + _times(num_windows),
        )

    def check_degrees(self, degrees: np.ndarray, people: np.ndarray) -> None:
        """Nothing: within a group, everybody may have met everybody."""

    def check_groups(self, sizes: np.ndarray) -> None:
        """Raises a DataError if one of the groups, of sizes int64 `[groups]`, is too large."""
        if sizes.max(initial=0) > self.max_group_size:
            raise DataError(
                f"degree_bound: a group by {self.group_column} has {sizes.max()} people, more than max_group_size "
                f"{self.max_group_size}: allow larger groups, or name another group_column"
            )


class EdgeLevel(Settings, tag_field="kind", tag="edge", omit_defaults=True):
    """Protects which pairs have met, and when; not people, whose own features and states are then not hidden.

    Guarantee: all contacts of a pair are in the rows of these two people and in no other: two rows change.
    """

    group_column: ClassVar[str | None] = None

    def influence(self, num_windows: int, num_slots: int) -> RowInfluence:
        """The bound, where everybody has a row for each of some windows in time, and a row has some slots."""
        return RowInfluence(
            "edge",
            "add_or_remove_one",
            2 * num_windows if num_slots else 0,
            "the contacts of a pair are in the rows of these two people only" + _times(num_windows),
        )

    def check_degrees(self, degrees: np.ndarray, people: np.ndarray) -> None:
        """Nothing: any degree will do."""

    def check_groups(self, sizes: np.ndarray) -> None:
        """Nothing: groups play no part."""


DegreeBound = DegreePromise | PublicGroups | EdgeLevel


def _times(num_windows: int) -> str:
    return f"; everybody has {num_windows} rows" if num_windows > 1 else ""
