"""Computes epsilons anew, from the events of the ledgers that are on record."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tff_pdp.privacy.accounting.ledger import Ledger, compose_worst_case
from tff_pdp.training.record.releases import Release, why_without_bound


class Recomputed(NamedTuple):
    """Epsilons of releases, each at the delta of its budget, infinite where no bound holds.

    Attributes:
      releases: what was computed from.
      own: of each release, by scope; empty of releases without a ledger.
      composed: of all releases together, by scope, at the largest delta of the scope.
      why_no_bound: why no epsilon holds for all of them together, if so; otherwise empty.
    """

    releases: Sequence[Release]
    own: Sequence[Mapping[str, float]]
    composed: Mapping[str, float]
    why_no_bound: str

    def of(self, run_id: str | None, name: str) -> int | None:
        """The place of a run among the releases: by its id or, of runs without one, the newest of its name."""
        places = [
            place
            for place, release in enumerate(self.releases)
            if (release.run_id == run_id if run_id else release.run == name)
        ]
        return places[-1] if places else None


def recompute(releases: Sequence[Release]) -> Recomputed:
    """Composes what is on record, by dp-accounting and from nothing but the events.

    Guarantee: as `tff_pdp.privacy.accounting.ledger.compose_worst_case`.
    Assumes: the same; the releases are about the same records.

    Args:
      releases: as of `tff_pdp.training.record.releases.all_releases`.
    """
    known: dict[Any, float] = {}
    why = why_without_bound(releases)
    ledgers = [release.ledger for release in releases if release.ledger is not None]
    own = [
        {}
        if release.ledger is None
        else {
            scope: math.inf if release.non_private else _epsilon([release.ledger], scope, known)
            for scope in release.ledger.budgets
        }
        for release in releases
    ]
    scopes = list(dict.fromkeys(scope for ledger in ledgers for scope in ledger.budgets))
    composed = {scope: math.inf if why else _epsilon(ledgers, scope, known) for scope in scopes}
    return Recomputed(releases, own, composed, why)


def over_budget(release: Release, epsilons: Mapping[str, float]) -> list[str]:
    """The scopes of a release that have spent more than their budgets."""
    if release.ledger is None or release.non_private:
        return []
    budgets = release.ledger.budgets
    return [scope for scope, epsilon in epsilons.items() if not is_at_most(epsilon, budgets[scope].epsilon)]


def is_at_most(value: float, bound: float) -> bool:
    """Whether a number is at most another, but for the rounding of other versions of NumPy and SciPy."""
    return value <= bound or math.isclose(value, bound, rel_tol=1e-6)


def _epsilon(ledgers: Sequence[Ledger], scope: str, known: dict[Any, float]) -> float:
    """As `compose_worst_case`, computed once where scopes have released the same."""
    parts = [ledger for ledger in ledgers if scope in ledger.budgets]
    key = tuple(_key(ledger, scope) for ledger in parts)
    if key not in known:
        known[key] = compose_worst_case(parts, scope).best
    return known[key]


def _key(ledger: Ledger, scope: str) -> Any:
    entries = tuple((entry.event, entry.count) for entry in ledger.entries if entry.scope == scope)
    return entries, ledger.budgets[scope].delta, ledger.unit, ledger.adjacency
