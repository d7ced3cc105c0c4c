"""The privacy plan: the one value that couples unit, adjacency, sampler, clip, noise and the accounting event.

Builders such as those of `tff_pdp.privacy.plans.silo_example` make it from a `PlannedTraining`. Training takes its
sampler and its noise from the plan, and the ledger takes its events from the same plan, so what runs and what is
accounted cannot drift apart.
"""

import abc
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import dp_accounting
import numpy as np

from tff_pdp.data.manifest import RowInfluence, Unit
from tff_pdp.errors import BudgetError, ConfigError, DataError
from tff_pdp.privacy.accounting.accountants import Adjacency, EpsilonBounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import hashable
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.plans.search import Search

Claim = Literal["formal", "formal-conditional", "empirical", "none"]
# What a scope releases once, before training, and what for.
FixedEvents = tuple[tuple[dp_accounting.DpEvent, str], ...]
# The reason in the ledger.
DRAWN_NOISE = "noise on a grid in place of ideal Gaussians"
# So many times the planned rounds may be run: rounds are drawn anew where the same bits cannot be had again.
_TIMES_DRAWN = 2


@dataclasses.dataclass(frozen=True)
class PlannedTraining:
    """What a plan is made for, all of it known before training.

    Attributes:
      num_examples: number n_k of training examples by client id, public or released with noise.
      gradients_per_round: by client id, gradient computations on local data in one round.
      rounds: planned rounds.
      selection_rounds: how many of them, from the first, select a cluster.
      fixed_events: by client id, what was released before training and has to fit into the budget as well.
      num_examples_are_noised: whether the n_k are a release that `fixed_events` covers.
      unsound: why nothing is claimed whatever the ledger says, if so.
      condition: under which condition the method's guarantee holds, if only under one.
      num_parameters: how many weights the model has, of all of which a silo's gradients are noised.
      num_released: how many values a client releases in a round.
      num_noised: how many of them noise changes anything by; None for all.
      noise_on_own_support: whether a client's share of the noise is only where its own release is not zero.
      total_weight: of all clients, where they count by weights that are at most one.
      search: what every silo repeats besides, with the same noise, to choose hyper-parameters.
      row_influence: how many rows one person can change, where examples are rows made of a contact graph.
    """

    num_examples: Mapping[str, int]
    gradients_per_round: Mapping[str, int]
    rounds: int
    selection_rounds: int = 0
    fixed_events: Mapping[str, FixedEvents] = dataclasses.field(default_factory=dict)
    num_examples_are_noised: bool = False
    unsound: str = ""
    condition: str = ""
    num_parameters: int = 0
    num_released: int = 0
    num_noised: int | None = None
    noise_on_own_support: bool = False
    total_weight: float | None = None
    search: Search | None = None
    row_influence: RowInfluence | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyPlan(abc.ABC):
    """Who is protected from whom, by which mechanism, at what cost.

    A plan has scopes, each with a budget and a ledger's entries of its own: every silo, where a silo's examples are
    protected; one for all users, where users are.

    Attributes:
      unit: what the guarantee protects.
      adjacency: how neighbouring data sets differ.
      claim: strength of the guarantee.
      claim_reason: one line that says why it is no weaker and no stronger.
      budgets: by scope; empty without privacy.
      rounds: planned number of rounds, for which the noise was calibrated.
      fixed_events: by scope, what it releases before training.
      drawn_noise: by scope, the noise that is drawn for it in place of ideal Gaussians; see `drawn_noise_event`.
      generator: of random bits in computations: batches, noise and selections.
    """

    unit: str
    adjacency: Adjacency
    claim: Claim
    claim_reason: str
    budgets: Mapping[str, SiloBudget]
    rounds: int
    fixed_events: Mapping[str, FixedEvents] = dataclasses.field(default_factory=dict)
    drawn_noise: Mapping[str, GridNoiseDpEvent] = dataclasses.field(default_factory=dict)
    generator: Generator = "philox"

    @abc.abstractmethod
    def scope_of(self, client_id: str) -> str:
        """The scope that a client's data belong to."""

    @abc.abstractmethod
    def cohort(
        self, round_number: int, client_ids: Sequence[str], generator: Callable[[int], ExactDraws]
    ) -> np.ndarray:
        """Who takes part in a round, counted from 1: places in `client_ids`, int64, ascending.

        Args:
          round_number: which.
          client_ids: all clients.
          generator: of a number, draws with a secret key of its own.
        """

    def client_mechanism(self, client_ids: Sequence[str]) -> Mapping[str, np.ndarray]:
        """What clients' gradient estimators take of the plan: `[clients]` by name."""
        del client_ids
        return {}

    def selection_epsilon(self, client_id: str, round_number: int) -> float:
        """What a client's selection in a round is run with: 0 for none, infinite for an exact one."""
        del client_id, round_number
        return 0.0

    @property
    def warning(self) -> str:
        """What to say of the plan before training; empty where there is nothing to say."""
        return ""

    @abc.abstractmethod
    def charges(self, scope: str, round_number: int) -> Sequence[tuple[dp_accounting.DpEvent, int, str]]:
        """What a round releases of a scope: event, how often, and what for."""

    @abc.abstractmethod
    def training_counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """What one whole training releases of a scope."""

    def planned_counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """What is released of a scope after the fixed events."""
        return self.training_counts(scope)

    def build_ledger(self) -> Ledger | None:
        """Returns a ledger with these budgets and what is released before training; None without budgets.

        Raises:
          BudgetError: the planned rounds would overspend a budget.
        """
        if not self.budgets:
            return None
        ledger = Ledger(self.unit, self.adjacency, self.budgets)
        self.precheck_rest(ledger)
        for scope in self.budgets:
            for event, reason in self.fixed_events.get(scope, ()):
                ledger.append(scope, event, 1, reason)
        self.charge_drawn_noise(ledger)
        return ledger

    def charge_drawn_noise(self, ledger: Ledger) -> None:
        """Enters the distance of all noise that is drawn from ideal noise, for scopes where it is not entered yet.

        Raises:
          BudgetError: a scope would overspend.
        """
        charged = {entry.scope for entry in ledger.entries if isinstance(entry.event, GridNoiseDpEvent)}
        for scope, event in self.drawn_noise.items():
            if scope not in charged and scope in ledger.budgets:
                ledger.append(scope, event, 1, DRAWN_NOISE)

    def with_noise_drawn_anew(self, ledger: Ledger | None, attempt: int) -> Ledger | None:
        """Returns a ledger, or a copy with the distance of one more whole training's noise, if it is not in there yet.

        Args:
          ledger: what has been spent.
          attempt: how often rounds will have been drawn anew.

        Raises:
          BudgetError: a scope would overspend.
        """
        if ledger is None or 1 + attempt <= _TIMES_DRAWN:
            return ledger
        ledger = copy.deepcopy(ledger)
        for scope, event in self.drawn_noise.items():
            if scope in ledger.budgets:
                ledger.append(scope, GridNoiseDpEvent(-(-event.values // _TIMES_DRAWN)), 1, DRAWN_NOISE)
        return ledger

    def precheck_rest(self, ledger: Ledger) -> None:
        """Checks that what is left of the plan fits into the budgets; entering it then takes no more accounting.

        Raises:
          BudgetError: it does not.
        """
        recorded: Counter[tuple[str, dp_accounting.DpEvent]] = Counter()
        for entry in ledger.entries:
            recorded[entry.scope, entry.event] += entry.count
        for scope in self.budgets:
            planned = Counter(hashable(event) for event, _ in self.fixed_events.get(scope, ()))
            if scope in self.drawn_noise:
                planned[self.drawn_noise[scope]] = 1
            planned.update(self.planned_counts(scope))
            # All together: each alone would fit where their sum does not.
            ledger.precheck_all(
                scope, {event: max(0, count - recorded[scope, event]) for event, count in planned.items()}
            )

    def guaranteed_epsilon(self, ledger: Ledger, client_id: str) -> EpsilonBounds:
        """The epsilon that may be claimed of what is released of a client: what is spent."""
        return ledger.epsilon(self.scope_of(client_id))

    def training_event(self, scope: str) -> dp_accounting.DpEvent:
        """The event of a scope's part in one whole training."""
        return dp_accounting.ComposedDpEvent(
            [dp_accounting.SelfComposedDpEvent(event, count) for event, count in self.training_counts(scope).items()]
        )

    def charge_round(self, ledger: Ledger, round_number: int) -> None:
        """Enters one round for every scope that it releases anything of, before it runs.

        Raises:
          BudgetError: a scope would overspend, or the plan has no such round; nothing has been entered.
        """
        if not 1 <= round_number <= self.rounds:
            raise BudgetError(
                f"Round {round_number} would overspend: the plan, and its noise, are for {self.rounds} rounds. "
                "The step was not run."
            )
        charges = {scope: self.charges(scope, round_number) for scope in self.budgets}
        for scope, events in charges.items():
            if events:
                ledger.precheck_all(scope, {event: count for event, count, _ in events})
        self.charge_drawn_noise(ledger)
        for scope, events in charges.items():
            for event, count, reason in events:
                ledger.append(scope, event, count, reason)


def drawn_noise_event(values: int) -> GridNoiseDpEvent:
    """The event of so many values of planned noise, and of as many in rounds that may have to be drawn anew."""
    return GridNoiseDpEvent(int(_TIMES_DRAWN * values))


_ADJACENCIES = {"node": ("replace_one", "replace_special"), "edge": ("add_or_remove_one",)}


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
