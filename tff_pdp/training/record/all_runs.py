"""Finds all runs on the same records, in all folders, and composes the runs' costs.

`releases_on_record` finds the runs in an experiment's folder and in the registry. `compose` bounds the joint cost of
these runs to given clients' records.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tff_pdp.errors import DataError
from tff_pdp.privacy.accounting.kept import side_by_side
from tff_pdp.privacy.accounting.ledger import Ledger, compose_parts
from tff_pdp.privacy.facts import claim_of_several
from tff_pdp.registry.entries import Registry
from tff_pdp.registry.entry import Entry
from tff_pdp.registry.matching import Match, RecordSet, declared_sets, match
from tff_pdp.registry.records import Records
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.releases import (
    Release,
    all_releases,
    release_of,
    why_without_bound,
    without_beginnings,
)

# If a client has more kinds of records, all count as being in every run that one of them is in: an upper bound.
_MOST_KINDS = 64
_USER = "user"


class OnRecord(NamedTuple):
    """A release that may have used the records in question.

    Attributes:
      release: spending of the release.
      folder: folder of the run, as text.
      records: name of the file with the records' digests in the registry; empty without digests.
      record_set: value of the setting `data.record_set` for the records.
      is_here: whether the release is in the folder of the present experiment.
    """

    release: Release
    folder: str
    records: str
    record_set: RecordSet
    is_here: bool


class Own(NamedTuple):
    """The clients whose cost is computed.

    Attributes:
      records: name of the file with the clients' digests in the registry.
      record_set: value of the setting `data.record_set` for the clients' records.
      scopes: scope of each client in ledgers, in the order of the digests; all users share one scope.
      are_users: whether the clients are users; users with equal ids are one user in all folders.
      is_unit_in_several: whether a unit of protection may be in several records, for example a user. In that case,
        a run that used one record of a scope counts for all records of the scope.
    """

    records: str
    record_set: RecordSet
    scopes: Sequence[str]
    are_users: bool = False
    is_unit_in_several: bool = False


@dataclasses.dataclass(frozen=True)
class Composed:
    """The joint cost of all runs on record to one scope (a silo, or all users).

    Attributes:
      epsilon: epsilon of all runs together, at `delta`; infinite if no bound holds.
      delta: sum of the deltas of budgets that count in full, plus the largest delta of the other budgets.
      runs: positions, in the list of releases on record, of the releases that used any of the scope's records.
      why_no_bound: reason why no epsilon holds, as a clause; empty if an epsilon holds.
    """

    epsilon: float
    delta: float
    runs: frozenset[int]
    why_no_bound: str = ""

    @property
    def releases(self) -> int:
        """Number of releases in `runs`."""
        return len(self.runs)

    def to_dict(self, claim: str, claim_reason: str) -> dict[str, Any]:
        """Returns plain data for `json.dumps`: the claim, its reason, the cost (None if the claim is `none`).

        `claim` is the weakest claim of all releases that have a claim; `claim_reason` is the reason for the claim.
        """
        if self.why_no_bound:
            claim, claim_reason = "none", self.why_no_bound
        elif self.releases > 1:
            claim, claim_reason = claim_of_several(claim, claim_reason)
        return {
            "claim": claim,
            "claim_reason": claim_reason,
            "epsilon": None if claim == "none" else self.epsilon,
            "delta": None if claim == "none" else self.delta,
            "releases_on_record": self.releases,
        }


@dataclasses.dataclass(frozen=True)
class AllRuns:
    """The cost of all runs on record, by scope.

    Attributes:
      by_scope: cost to each scope.
      elsewhere: number of counted releases outside the experiment's folder.
      notes: assumptions that the cost depends on, one sentence each.
    """

    by_scope: Mapping[str, Composed]
    elsewhere: int
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Composed:
        """The largest epsilon of any scope, with the largest delta of any scope and the runs of all scopes."""
        return _worst(self.by_scope.values())

    @property
    def runs(self) -> int:
        """Number of releases that used any of the records."""
        return self.worst.releases


def releases_on_record(registry: Registry, output: Path) -> list[OnRecord]:
    """Finds all releases: by runs in an experiment's folder, by runs replaced there, and by runs in the registry.

    Guarantee: the result has each release once, with at least the release's spending. If a folder was moved, deleted or
      restored from an older copy, the spending in the registry counts.

    Raises:
      DataError: the registry, or the record of a run in the folder, is damaged; the message names the file.
    """
    in_folder = all_releases(output)
    found: list[OnRecord] = []
    included: set[str] = set()
    entries = registry.entries()
    entered = {entry.run_id for entry in entries}
    copies = {entry.copy_head for entry in entries if entry.copy_head}
    for entry in entries:
        own = [one for one in in_folder if one.run_id == entry.run_id]
        releases = [_entered(entry)] if entry.copy_head else _newest(entry, own, copies)
        included |= {entry.includes} if releases else set()
        is_here = bool(own) or output.absolute() in (Path(entry.folder), Path(entry.folder).parent)
        found += [OnRecord(one, entry.folder, entry.records, entry.record_set, is_here) for one in releases]
    others = [one for one in in_folder if one.run_id not in entered]
    found += [OnRecord(release, str(output), "", None, is_here=True) for release in others]
    return [one for one in found if not one.release.run_id or one.release.run_id not in included]


def _newest(entry: Entry, own: Sequence[Release], copies: Collection[str]) -> list[Release]:
    """Finds the most that a run has spent, by its own record or, if that is incomplete, by the registry.

    `own` are the run's releases in the experiment's folder; `copies` are the ends of records of copies that have
    entries of their own.
    """
    there = without_beginnings([*own, *_stated_in_folder(entry)])
    # A copy is believed only if it has all that the registry knows of the run.
    newest = [one for one in there if one.chains and entry.is_in(one.chains, one.size)]
    newest = newest or [_entered(entry)]
    # A copy that went on under another registry has released something, too.
    told = {*copies, *entry.heads, *(chain for one in newest for chain in one.chains)}
    others = [one for one in there if one not in newest and _is_untold(one, told, newest)]
    return [one for one in (*newest, *others) if one.rounds]


def _entered(entry: Entry) -> Release:
    """Returns the release that the registry has of a run."""
    cost = entry.upper
    return Release(cost.ledger, entry.non_private, entry.method, cost.rounds, entry.run_id)


def _is_untold(release: Release, told: Collection[str], newest: Sequence[Release]) -> bool:
    """Checks if a release has spending that is not counted for its run already."""
    if release.head:
        return release.head not in told
    return release.size > max(one.size for one in newest)


def _stated_in_folder(entry: Entry) -> list[Release]:
    """Reads the release in the folder that the run began in; empty if it cannot be read, or is another run's."""
    with contextlib.suppress(DataError, OSError):
        charges = read_charges(Path(entry.folder))
        if charges is not None and charges.run_id == entry.run_id:
            return [release_of(charges)]
    return []


def compose(registry: Registry, found: Sequence[OnRecord], own: Own) -> AllRuns:
    """Composes all releases that used any of the given clients' records, into one cost per scope.

    Guarantee: for each scope, the releases together are (epsilon, delta)-DP for each record of the scope, if in every
      data set the record is in only one client, or has the same digest in all its clients.
    Assumes: as in `compose_parts`; `registry.matching.match` finds all shared records. Within one folder, clients with
      equal names are one client. A release without digests used the records of the clients in its ledger.

    Args:
      registry: registry that has the digests.
      found: all releases, from `releases_on_record`.
      own: the clients whose cost is computed.

    Raises:
      DataError: a file of digests is damaged; the message names the file.
    """
    records = registry.records(own.records)
    key = registry.key()
    own_sets = declared_sets(key, records, own.record_set)
    matches: dict[tuple[str, str, bool], Match] = {}
    parts: list[_Part] = []
    for number, one in enumerate(found):
        # With the folder, so that a reader can find the run.
        run = one.release.run if one.is_here else f"{one.release.run} in {one.folder}"
        part = _Part(number, one.release._replace(run=run), own.are_users, None, {})
        if not one.records:
            parts.append(part)
            continue
        ledger = one.release.ledger
        by_name = one.is_here or own.are_users or (ledger is not None and ledger.unit == _USER)
        place = (one.records, repr(one.record_set), by_name)
        other = registry.records(one.records)
        if place not in matches:
            other_sets = declared_sets(key, other, one.record_set)
            matches[place] = match(records, other, own_sets, other_sets, by_name=by_name)
        if matches[place].everyone:
            places = _places(key.clients, one.release, other)
            parts.append(part._replace(match=matches[place], places=places))
    clients_of: dict[str, list[int]] = {}
    for place, scope in enumerate(own.scopes):
        clients_of.setdefault(scope, []).append(place)
    by_kind = {
        scope: [
            functools.partial(_composed, *_paid(parts, scope, kind))
            for kind in _kinds(parts, clients, records, is_unit_in_several=own.is_unit_in_several)
        ]
        for scope, clients in clients_of.items()
    }
    costs = iter(side_by_side([call for calls in by_kind.values() for call in calls]))
    by_scope = {scope: _worst([next(costs) for _ in calls]) for scope, calls in by_kind.items()}
    runs = frozenset().union(*(one.runs for one in by_scope.values()))
    undecided = {part.number for part in parts if part.is_undecided} & runs
    # Releases without digests in which no client of these names was.
    others = [found[part.number] for part in parts if part.match is None and part.number not in runs]
    return AllRuns(
        by_scope=by_scope,
        elsewhere=sum(not found[number].is_here for number in runs),
        notes=_notes([found[number] for number in sorted(undecided)], others),
    )


class _Part(NamedTuple):
    """A release that some records may have been in.

    Attributes:
      number: place of the release on record.
      release: spending of the release.
      are_users: whether the clients that are asked for are users.
      match: the records in the release; None for a release without digests, by a run of an earlier version.
      places: scope of each client in the release's ledger, by the client's place in the digests.
    """

    number: int
    release: Release
    are_users: bool
    match: Match | None
    places: Mapping[int, str]

    @property
    def is_undecided(self) -> bool:
        return self.match is None or self.match.is_undecided

    def groups(self, records: Records, clients: Sequence[int]) -> np.ndarray:
        """Numbers the kinds of the clients' records: int64 `[kinds or records]`."""
        first = records.first
        if self.match is None:
            # A client without any record counts as one.
            return np.zeros(sum(max(1, first[one + 1] - first[one]) for one in clients), np.int64)
        return np.concatenate([self.match.of_records(first[one], first[one + 1], one) for one in clients])

    def scopes(self, scope: str, groups: Iterable[int]) -> list[str] | None:
        """Returns the release's scopes that a scope's records of these kinds are in; None if they are in none."""
        ledger, match = self.release.ledger, self.match
        members = frozenset().union(*(match.members[group] for group in set(groups))) if match else frozenset()
        if match and not members:
            return None
        if ledger is None:
            # It may have been about any client.
            return []
        if match is None and scope not in ledger.budgets:
            # Silos that the run does not know are not in it; users and silos have no names in common.
            return [] if (ledger.unit == _USER) != self.are_users else None
        if match is None:
            return [scope]
        if ledger.unit == _USER:
            return list(ledger.budgets)
        return [self.places[place] for place in sorted(members) if place in self.places]


def _places(digests_of, release: Release, other: Records) -> dict[int, str]:
    """Returns the scope of each client in the release's ledger, by the client's place in the digests."""
    if release.ledger is None or release.ledger.unit == _USER:
        return {}
    names = list(release.ledger.budgets)
    by_client = dict(zip(digests_of(names).tolist(), names, strict=True))
    return {place: by_client[one] for place, one in enumerate(other.clients.tolist()) if one in by_client}


def _worst(costs: Collection[Composed]) -> Composed:
    """Returns the largest of some costs, with the largest delta and the runs of all."""
    worst = max(costs, key=lambda one: (one.why_no_bound != "", one.epsilon))
    runs = frozenset().union(*(one.runs for one in costs))
    return dataclasses.replace(worst, delta=max(one.delta for one in costs), runs=runs)


def _kinds(
    parts: Sequence[_Part], clients: Sequence[int], records: Records, *, is_unit_in_several: bool
) -> Iterator[Sequence[Sequence[int]]]:
    """Yields each kind of records, as the groups of these records in each release."""
    if not parts:
        yield []
        return
    groups = np.stack([part.groups(records, clients) for part in parts], axis=1)
    kinds = np.unique(groups, axis=0)
    if is_unit_in_several or len(kinds) > _MOST_KINDS:
        yield [np.unique(column).tolist() for column in kinds.T]
        return
    for kind in kinds:
        yield [[int(group)] for group in kind]


def _paid(
    parts: Sequence[_Part], scope: str, kind: Sequence[Sequence[int]]
) -> tuple[list[tuple[Ledger, str]], frozenset[int], str]:
    """Finds the releases that a kind of a scope's records was in: ledgers with scopes, numbers, why no bound holds."""
    touched = [
        (part, scopes)
        for part, groups in zip(parts, kind, strict=True)
        if (scopes := part.scopes(scope, groups)) is not None
    ]
    paid = [(part.release.ledger, one) for part, scopes in touched if part.release.ledger for one in scopes]
    why_no_bound = why_without_bound([part.release for part, _ in touched])
    return paid, frozenset(part.number for part, _ in touched), why_no_bound


def _composed(paid: list[tuple[Ledger, str]], runs: frozenset[int], why_no_bound: str) -> Composed:
    """Composes all releases that a kind of records was in."""
    if why_no_bound:
        delta = max((ledger.budgets[one].delta for ledger, one in paid), default=0.0)
        return Composed(math.inf, delta, runs, why_no_bound)
    if not paid:
        return Composed(0.0, 0.0, runs)
    bounds, delta = compose_parts(paid)
    bare = f"a run on record has {'users' if paid[0][0].unit == _USER else 'silos'} without noise, or without a budget"
    return Composed(bounds.best, delta, runs, "" if math.isfinite(bounds.best) else bare)


def _notes(undecided: Sequence[OnRecord], by_name_alone: Sequence[OnRecord]) -> tuple[str, ...]:
    without_digests = "on record without digests of records, and counted"
    texts = {
        f"{without_digests} as being about the same records": [one for one in undecided if not one.records],
        f"{without_digests} for clients of its own names alone": by_name_alone,
        "on records made of the same raw files in another way, and counted as being about the same records; "
        "data.record_set can say whether they are": [one for one in undecided if one.records],
    }
    return tuple(f"{_listed(found)}: {text}" for text, found in texts.items() if found)


def _listed(found: Sequence[OnRecord]) -> str:
    first = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{first.release.run} in {first.folder}{more}"
