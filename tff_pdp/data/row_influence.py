"""How many training rows of a data set one person, or one contact of two people, can change."""

import dataclasses
from typing import Any, Literal

Unit = Literal["node", "edge"]
RowAdjacency = Literal["replace_one", "replace_special", "add_or_remove_one"]


@dataclasses.dataclass(frozen=True)
class RowInfluence:
    """What rows made of a contact graph promise: a bound that whoever makes the rows proves, and privacy plans use.

    Rows of such a data set are not independent: a person is in its own row and in those of its contacts. Protecting
    single rows would not protect the person.

    Attributes:
      unit: what is protected: `node`, a person with all its contacts; `edge`, all contacts of one pair of people.
      adjacency: how neighbouring graphs differ: a person takes other values and other contacts (`replace_one`); is
        there, or is as if it were not, in a row of zeros (`replace_special`); a pair's contacts are there or are not
        (`add_or_remove_one`, of the unit `edge`).
      num_rows: S, the most rows that differ between neighbouring graphs, the person's own included. The number of rows,
        and which silo each belongs to, is the same in both.
      rule: why S holds, in one line.
    """

    unit: Unit
    adjacency: RowAdjacency
    num_rows: int
    rule: str

    @classmethod
    def from_fields(cls, fields: dict[str, Any] | None) -> "RowInfluence | None":
        """What a manifest holds of it; None for data sets whose rows are independent."""
        return None if fields is None else cls(**fields)
