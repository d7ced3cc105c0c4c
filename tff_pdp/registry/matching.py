"""Finds the records that two runs have in common, by digests and declarations; undecided records count as common."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tff_pdp.registry.records import RecordKey, Records

# As a configuration declares records: one name for all clients, a name by client, or nothing.
RecordSet = str | Mapping[str, str] | None
_NOBODY: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Match:
    """The records of one run that another run uses too.

    Attributes:
      groups: int64 `[records]`, each record's position in `members`.
      members: for each group, the other run's clients that have the group's records.
      forced: for each client of the run, clients of the other run that count as having all of the client's records.
      is_undecided: whether it is unknown for some records if they are the same; they then count as the same.
    """

    groups: np.ndarray
    members: Sequence[frozenset[int]]
    forced: Sequence[frozenset[int]]
    is_undecided: bool

    def of_records(self, first: int, last: int, client: int) -> np.ndarray:
        """Returns the groups of a client's records or, if it has no records, its own group: int64 `[at least 1]`."""
        if last > first:
            return self.groups[first:last]
        return np.array([self.members.index(self.forced[client])])

    @property
    def everyone(self) -> frozenset[int]:
        """All clients of the other run that have any record of this run."""
        return frozenset().union(*self.members)


def declared_sets(key: RecordKey, records: Records, declared: RecordSet) -> list[str | None]:
    """Returns the declared set of each client's records; None for a client without a declared set."""
    if declared is None or isinstance(declared, str):
        return [declared] * len(records.clients)
    by_client = dict(zip(key.clients(declared).tolist(), declared.values(), strict=True))
    return [by_client.get(client) for client in records.clients.tolist()]


def match(
    own: Records,
    other: Records,
    own_sets: Sequence[str | None],
    other_sets: Sequence[str | None],
    *,
    by_name: bool = False,
) -> Match:
    """Finds a run's records in another run.

    Records are the same if their digests are equal, or if both are declared to be from one set. If two data sets are
    made from the same raw file in different ways, digests of the same record differ; such records count as the same,
    unless they are declared to be from different sets.

    Guarantee: each record that both runs have in the same form is found.
    Assumes: the same record in different forms is declared, or the manifests name the same files of raw data.

    Args:
      own: records of the run.
      other: records of the other run, under the same key.
      own_sets: declared set, or None, of each client of `own`.
      other_sets: declared set, or None, of each client of `other`.
      by_name: whether clients with the same name are the same (users, and clients of one folder), unless their declared
        sets differ.
    """
    places = {client: place for place, client in enumerate(other.clients.tolist())}
    named = [places.get(client) for client in own.clients.tolist()]
    if own.dataset and own.dataset == other.dataset:
        same = [_NOBODY if place is None else frozenset([place]) for place in named]
        return _match(own, [_NOBODY] * len(own.digests), same, is_undecided=False)
    are_named = own.are_named and other.are_named
    could_differ = own.form != other.form and not set(own.sources).isdisjoint(other.sources)
    forced = [
        _forced(own_set, place, other_sets, could_differ=could_differ, by_name=by_name, are_named=are_named)
        for own_set, place in zip(own_sets, named, strict=True)
    ]
    is_undecided = could_differ and any(
        own_set is None or any(set_ is None for set_ in other_sets) for own_set in own_sets
    )
    return _match(own, _holders(own.digests, other), forced, is_undecided=is_undecided and any(forced))


def _forced(
    own_set: str | None,
    named: int | None,
    other_sets: Sequence[str | None],
    *,
    could_differ: bool,
    by_name: bool,
    are_named: bool,
) -> frozenset[int]:
    """Returns the other run's clients that a client's records are in, whatever their digests say."""

    def may_be_same(other_set: str | None) -> bool:
        if own_set is not None and other_set is not None:
            return own_set == other_set
        return could_differ

    same_name = _NOBODY if named is None else frozenset([named])
    by_folder = same_name if named is not None and by_name and None in (own_set, other_sets[named]) else _NOBODY
    anybody = frozenset(place for place, other_set in enumerate(other_sets) if may_be_same(other_set))
    if could_differ and not are_named:
        return anybody | by_folder
    # Among all clients that it may be, the one of the same name is meant.
    return by_folder or anybody & same_name or anybody


def _holders(digests: np.ndarray, other: Records) -> list[frozenset[int]]:
    """Returns for each record the other run's clients that have one with this digest."""
    order = np.argsort(other.digests, kind="stable")
    holder = np.repeat(np.arange(len(other.clients)), np.diff(other.first))[order]
    known = other.digests[order]
    low, high = np.searchsorted(known, digests, "left"), np.searchsorted(known, digests, "right")
    found = [_NOBODY] * len(digests)
    for place in np.flatnonzero(high > low).tolist():
        found[place] = frozenset(holder[low[place] : high[place]].tolist())
    return found


def _match(
    own: Records, holders: Sequence[frozenset[int]], forced: Sequence[frozenset[int]], *, is_undecided: bool
) -> Match:
    numbers: dict[frozenset[int], int] = {}
    for members in forced:
        numbers.setdefault(members, len(numbers))
    groups = np.zeros(len(own.digests), np.int64)
    for client, (first, last) in enumerate(zip(own.first[:-1].tolist(), own.first[1:].tolist(), strict=True)):
        for place in range(first, last):
            groups[place] = numbers.setdefault(holders[place] | forced[client], len(numbers))
    return Match(groups, list(numbers), forced, is_undecided)
