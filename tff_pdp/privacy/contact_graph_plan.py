"""Node- and edge-level DP in silos as a plan: for rows made of a contact graph, in several of which one person is."""

import dataclasses
from typing import get_args

import dp_accounting

from tff_pdp.data.row_influence import RowInfluence, Unit
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.accounting.row_influence import poisson_rows_event
from tff_pdp.privacy.silo_example_plan import SiloExamplePlan

_ADJACENCIES = {"node": ("replace_one", "replace_special"), "edge": ("add_or_remove_one",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContactGraphPlan(SiloExamplePlan):
    """Protects one person of a contact graph, or all contacts of one pair of people, in place of one example.

    Silos train as under `SiloExamplePlan`; what a gradient costs is another event, which counts every row that the
    person, or the pair, is in.

    Guarantee: with claim `formal-conditional`, everything that leaves silo k, and its personal model, is (epsilon_k,
      delta_k)-DP for the people of silo k (`node`) or for each pair's contacts (`edge`), where the ledger built here
      bounds epsilon_k.
    Assumes: what `row_influence` promises of the rows, and what `claim_reason` says. What one person's disease does to
      others' states is not a contact nor one's own value: neighbouring graphs have the same states of all others.

    Attributes:
      row_influence: what is protected, and S, the most rows that change with it.
    """

    row_influence: RowInfluence

    def gradient_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of one gradient computation in a silo."""
        mechanism = self.mechanisms[client_id]
        changed = changed_rows(self.row_influence, self.num_examples[client_id])
        return poisson_rows_event(mechanism.sampling_rate, mechanism.noise_multiplier, changed, 1)


def changed_rows(row_influence: RowInfluence, num_rows: int) -> int:
    """How many rows of a silo differ between neighbouring graphs: S, and of fewer rows all."""
    return min(row_influence.num_rows, num_rows)


def check_suits_rows(plan: str, row_influence: RowInfluence | None) -> None:
    """Checks that a plan protects what the rows of a data set are made of.

    Args:
      plan: its name in a configuration.
      row_influence: of the data set.

    Raises:
      ConfigError: it does not; the message names the plan that does.
      DataError: the data set promises something that means nothing.
    """
    if plan == "contact_graph":
        checked_promise(row_influence)
    elif plan != "none" and row_influence is not None:
        raise ConfigError(
            f"privacy.plan {plan} is for examples that are independent. The examples of this data set are rows made of "
            f"a contact graph, and one {row_influence.unit} is in up to {row_influence.num_rows} of them: to protect "
            "single rows would not protect people. Set privacy.plan to contact_graph"
        )


def checked_promise(row_influence: RowInfluence | None) -> RowInfluence:
    """Returns what a data set promises of its rows.

    Raises:
      ConfigError: it promises nothing.
      DataError: the promise means nothing.
    """
    if row_influence is None:
        raise ConfigError(
            "privacy.plan contact_graph is for rows made of a contact graph, and this data set's manifest has no "
            "row_influence: its examples are independent. Set privacy.plan to silo_example, or to user"
        )
    # A manifest is a file that can be edited.
    unit, least = row_influence.unit, 1 if row_influence.unit == "node" else 0
    if unit not in get_args(Unit) or row_influence.adjacency not in _ADJACENCIES[unit]:
        raise DataError(
            f"manifest.json: row_influence has unit {unit!r} and adjacency {row_influence.adjacency!r}; known are node "
            "with replace_one or replace_special, and edge with add_or_remove_one: prepare the data again"
        )
    if not isinstance(row_influence.num_rows, int) or row_influence.num_rows < least:
        raise DataError(
            f"manifest.json: row_influence has num_rows {row_influence.num_rows!r}, which must be a whole number, at "
            f"least {least}: prepare the data again"
        )
    return row_influence
