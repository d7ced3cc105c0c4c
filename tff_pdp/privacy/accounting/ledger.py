"""Records releases: an append-only list of events for each scope, and their joint epsilon."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping

import dp_accounting

import tff_pdp.privacy.accounting.row_influence  # noqa: F401 - stored ledgers may hold its events.
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import Adjacency, EpsilonBounds, epsilon_bounds, quick_epsilon
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import ParameterChoiceDpEvent, event_from_dict, event_to_dict, hashable
from tff_pdp.privacy.accounting.kept import side_by_side


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """One kind of release, repeated `count` times.

    Attributes:
      scope: owner of the data: a silo's name, or one name for all users at user level.
      event: one release.
      count: number of these releases.
      reason: purpose of the release, in the words of the report.
    """

    scope: str
    event: dp_accounting.DpEvent
    count: int
    reason: str


class Ledger:
    """An append-only record of releases, which refuses releases that would overspend a budget.

    Guarantee: for every scope, all recorded releases together are (epsilon, delta)-DP for that scope's records, with
    `epsilon(scope).best` at most the budget. The order in which steps were recorded does not matter.
    Assumes: all releases about the scope's data are recorded, also releases of earlier runs; every event holds for the
    ledger's adjacency; noise multipliers, sampling rates, counts and budgets are public and fixed without looking at
    the data, so that the step at which the ledger refuses is public, too.

    >>> from tff_pdp.privacy.accounting.accountants import poisson_gaussian_event
    >>> ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"clinic": SiloBudget(1.0, 1e-5)})
    >>> ledger.append("clinic", poisson_gaussian_event(0.1, 4.0, 1), 50, "DP-SGD training")
    >>> round(ledger.epsilon("clinic").best, 2)
    0.68
    """

    def __init__(self, unit: str, adjacency: Adjacency, budgets: Mapping[str, SiloBudget]):
        """Creates an empty ledger.

        Args:
          unit: unit of protection: `silo_example`, `user`, `node`, `edge` or `instance`.
          adjacency: the neighbouring relation of every event in this ledger.
          budgets: budget of each scope.
        """
        self.unit = unit
        self.adjacency = adjacency
        self.budgets = dict(budgets)
        self._entries: list[LedgerEntry] = []
        # By scope: how often each event was recorded, and a set of counts known to fit. Releasing less reveals less,
        # so whatever lies within the verified counts fits too, without accounting.
        self._counts: dict[str, dict[dp_accounting.DpEvent, int]] = {scope: {} for scope in self.budgets}
        self._verified: dict[str, dict[dp_accounting.DpEvent, int]] = {scope: {} for scope in self.budgets}

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """All entries in order of their first release; releases of one event for the same reason are one entry."""
        return tuple(self._entries)

    @property
    def num_events(self) -> int:
        """Number of events recorded, in all scopes."""
        return sum(entry.count for entry in self._entries)

    def precheck(self, scope: str, further: Mapping[dp_accounting.DpEvent, int]) -> None:
        """Checks that further releases, all together, stay within the scope's budget. Nothing is recorded.

        After a check of a whole plan, a check of any part of the plan compares counts only, which takes no time.

        Args:
          scope: owner of the data.
          further: number of times that each further event is to be released.

        Raises:
          BudgetError: the releases would overspend, or no accountant supports them under the ledger's adjacency.
          ConfigError: unknown scope, or a count that is not a whole number of at least 0.
        """
        self._check_scope(scope)
        for count in further.values():
            if count < 0 or count != int(count):
                raise ConfigError(f"The number of releases is {count!r}; it must be a whole number, zero or more.")
        counts, verified = self._counts[scope], self._verified[scope]
        further = {event: int(count) for event, count in further.items() if count}
        planned = {**counts, **{event: counts.get(event, 0) + count for event, count in further.items()}}
        if not further or all(total <= verified.get(kind, 0) for kind, total in planned.items()):
            return
        would_be = self._bounds(scope, planned).best
        budget = self.budgets[scope].epsilon
        if would_be > budget:
            spent = self._bounds(scope, counts).best
            raise BudgetError(
                f"{self._scope_words(scope)} would overspend its privacy budget: {spent:.4g} spent, {would_be:.4g} "
                f"after {sum(further.values())} more releases, of epsilon={budget:g} at "
                f"delta={self.budgets[scope].delta:g}. "
                "The step was not run. Stop here, plan fewer rounds, or start again with more noise or a larger budget."
            )
        self._verified[scope] = planned
        event, count = max(further.items(), key=lambda item: item[1])
        if 2 * count <= planned[event]:
            self._look_ahead(scope, event, verified)

    def append(self, scope: str, event: dp_accounting.DpEvent, count: int = 1, reason: str = "") -> None:
        """Records `count` releases of `event`, after `precheck`: an overspending entry is never recorded.

        Raises:
          BudgetError, ConfigError: as in `precheck`.
        """
        event = hashable(event)
        self.precheck(scope, {event: count})
        if count == 0:
            return
        count = int(count)
        self._add(scope, event, count)
        # Newest first: the entry of the round before is among the last.
        for position in range(len(self._entries) - 1, -1, -1):
            entry = self._entries[position]
            if (entry.scope, entry.event, entry.reason) == (scope, event, reason):
                self._entries[position] = dataclasses.replace(entry, count=entry.count + count)
                return
        self._entries.append(LedgerEntry(scope, event, count, reason))

    def epsilon(self, scope: str) -> EpsilonBounds:
        """Bounds the epsilon that the scope has spent so far, at its budget's delta."""
        self._check_scope(scope)
        return self._bounds(scope, self._counts[scope])

    def epsilons(self) -> dict[str, EpsilonBounds]:
        """Bounds the epsilon that every scope has spent so far, in several processes if the bounds take long."""
        calls = [
            functools.partial(epsilon_bounds, _composed(self._counts[scope]), budget.delta, self.adjacency)
            for scope, budget in self.budgets.items()
        ]
        return dict(zip(self.budgets, side_by_side(calls), strict=True))

    def epsilon_at_most(self, scope: str) -> float:
        """Bounds the epsilon that the scope has spent so far, for display after every round of a training.

        Guarantee: the result is at least the epsilon that all releases of the scope cost at the budget's delta. If a
          noised number sets parameters of later releases, the result is the budget, which holds for every number.
        Assumes: as for the ledger.

        The result takes about a millisecond, and may be larger than `epsilon(scope).best`. The result is at most the
        budget once `precheck` has found that the releases fit.

        Raises:
          ConfigError: unknown scope.
          BudgetError: no accountant supports the releases under the ledger's adjacency.
        """
        self._check_scope(scope)
        counts, budget = self._counts[scope], self.budgets[scope]
        if self.follows_from_a_choice(scope):
            return budget.epsilon
        quick = quick_epsilon(_composed(counts), budget.delta, self.adjacency)
        if quick <= budget.epsilon:
            return quick
        verified = self._verified[scope]
        if all(total <= verified.get(event, 0) for event, total in counts.items()):
            return budget.epsilon
        return self.epsilon(scope).best

    def to_json(self) -> str:
        """Returns the whole ledger as JSON text; `from_json` restores the ledger exactly."""
        return json.dumps(
            {
                "unit": self.unit,
                "adjacency": self.adjacency.value,
                "budgets": {scope: [budget.epsilon, budget.delta] for scope, budget in self.budgets.items()},
                "entries": [
                    {"scope": e.scope, "event": event_to_dict(e.event), "count": e.count, "reason": e.reason}
                    for e in self._entries
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Restores a ledger from the text that `to_json` returned.

        Raises:
          ConfigError: the text is not a ledger, or has an unknown event.
        """
        try:
            stored = json.loads(text)
            budgets = {scope: SiloBudget(*numbers) for scope, numbers in stored["budgets"].items()}
            ledger = cls(stored["unit"], Adjacency(stored["adjacency"]), budgets)
            # Past releases are restored as they are, and not judged again.
            for entry in stored["entries"]:
                event = event_from_dict(entry["event"])
                ledger._entries.append(LedgerEntry(entry["scope"], event, entry["count"], entry["reason"]))
                ledger._add(entry["scope"], event, entry["count"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"Not a stored privacy ledger ({type(error).__name__}: {error}).") from error
        return ledger

    def _add(self, scope: str, event: dp_accounting.DpEvent, count: int) -> None:
        self._counts[scope][event] = self._counts[scope].get(event, 0) + count

    def _look_ahead(
        self, scope: str, event: dp_accounting.DpEvent, before: Mapping[dp_accounting.DpEvent, int]
    ) -> None:
        """Verifies larger counts than planned, so that a run charged step by step seldom needs accounting."""
        planned = self._verified[scope]
        for factor, others in ((2.0, before), (2.0, {}), (1.25, {}), (1.05, {})):
            further = {kind: max(total, others.get(kind, 0)) for kind, total in planned.items()}
            further[event] = int(factor * planned[event])
            if self._bounds(scope, further).best <= self.budgets[scope].epsilon:
                self._verified[scope] = further
                return

    def _bounds(self, scope: str, counts: Mapping[dp_accounting.DpEvent, int]) -> EpsilonBounds:
        return epsilon_bounds(_composed(counts), self.budgets[scope].delta, self.adjacency)

    def follows_from_a_choice(self, scope: str) -> bool:
        """Checks if parameters of the scope's releases depend on a number that was itself released with noise."""
        return any(isinstance(event, ParameterChoiceDpEvent) for event in self._counts.get(scope, ()))

    def _check_scope(self, scope: str) -> None:
        if scope not in self.budgets:
            raise ConfigError(f"{self._scope_words(scope)} has no privacy budget in this ledger.")

    def _scope_words(self, scope: str) -> str:
        return f"Silo {scope!r}" if self.unit in ("silo_example", "node", "edge") else f"Scope {scope!r}"


def compose_parts(parts: Iterable[tuple[Ledger, str]]) -> tuple[EpsilonBounds, float]:
    """Bounds the joint cost of all releases in the given scopes of ledgers, for a record that is in all given scopes.

    Use this bound to compare methods: each ledger is within its own budget, but all ledgers together reveal more.

    If a noised number sets parameters of a scope's later releases, the ledger does not show the releases that other
    numbers would have caused. The scope is then counted with its whole budget, which is a bound whatever number was
    released.

    Guarantee: all releases in the given scopes are jointly (epsilon, delta)-DP, with `best` of the returned bounds and
    the returned delta, for records that are in all given scopes.
    Assumes: the ledgers list all releases about the records.

    Args:
      parts: pairs of a ledger and one of its scopes; all ledgers have the same unit and adjacency.

    Returns:
      The bounds on epsilon, and their delta: the sum of the deltas of scopes that cost their whole budgets, plus the
      largest delta of the other scopes.

    Raises:
      BudgetError: the units or adjacencies differ.
      ConfigError: there are no parts.
    """
    parts = list(parts)
    if not parts:
        raise ConfigError("No ledger has a privacy budget for these records.")
    kinds = {(ledger.unit, ledger.adjacency) for ledger, _ in parts}
    if len(kinds) > 1:
        listed = "; ".join(sorted(f"{unit} under {adjacency.value}" for unit, adjacency in kinds))
        raise BudgetError(f"Ledgers of different kinds cannot be composed: {listed}.")
    chosen = [ledger.budgets[scope] for ledger, scope in parts if ledger.follows_from_a_choice(scope)]
    others = [(ledger, scope) for ledger, scope in parts if not ledger.follows_from_a_choice(scope)]
    bounds, of_others = EpsilonBounds(rdp=None, pld=None, best=0.0), 0.0
    if others:
        union = dp_accounting.ComposedDpEvent([_composed(ledger._counts[scope]) for ledger, scope in others])
        of_others = max(ledger.budgets[scope].delta for ledger, scope in others)
        ((_, adjacency),) = kinds
        bounds = epsilon_bounds(union, of_others, adjacency)
    if chosen:
        best = bounds.best + sum(budget.epsilon for budget in chosen)
        bounds = EpsilonBounds(rdp=None, pld=None, best=best)
    return bounds, of_others + sum(budget.delta for budget in chosen)


def _composed(counts: Mapping[dp_accounting.DpEvent, int]) -> dp_accounting.DpEvent:
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(event, count) for event, count in counts.items()]
    )
