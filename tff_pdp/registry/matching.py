"""Finds the records that two runs share, by digests and declarations; records in doubt count as shared."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tff_pdp.registry.records import RecordKey, Records

# As a configuration declares records: one name for all clients, a name by client, or nothing.
RecordSet = str | Mapping[str, str] | None
_NOBODY: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Match:
    """The records that a run shares with another run, grouped by the other run's clients that have them.

    Attributes:
      groups: int64 `[records]`, group of each record of the run: a position in `members`.
      members: for each group, positions of the other run's clients that have the group's records.
      forced: for each client of the run, positions of the other run's clients that count as having all of the client's
        records.
      is_undecided: whether there are records in doubt, which count as shared.
    """

    groups: np.ndarray
    members: Sequence[frozenset[int]]
    forced: Sequence[frozenset[int]]
    is_undecided: bool

    def of_records(self, first: int, last: int, client: int) -> np.ndarray:
        """Returns groups of records `first` to `last - 1`, int64; without records, the `forced` group of `client`."""
        if last > first:
            return self.groups[first:last]
        return np.array([self.members.index(self.forced[client])])

    @property
    def everyone(self) -> frozenset[int]:
        """Positions of all clients of the other run that have any record of this run."""
        return frozenset().union(*self.members)


def declared_sets(key: RecordKey, records: Records, declared: RecordSet) -> list[str | None]:
    """Returns, for each client, the declared name of the set that its records are from; None without a name."""
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
    """Finds the records that a run shares with another run.

    Two records count as the same if their digests are equal, or if the same set is declared for both. If two data sets
    were made from one raw file in different ways, the same record may have two digests. Records that may be the same
    for this reason count as the same, unless different sets are declared.

    Guarantee: each record that both runs have in the same form is found.
    Assumes: the same record in different forms is declared, or the manifests name the same files of raw data.

    Args:
      own: records of the run.
      other: records of the other run, under the same key.
      own_sets: for each client of `own`, its declared set or None.
      other_sets: for each client of `other`, its declared set or None.
      by_name: whether clients with equal names count as one client, unless their declared sets differ.
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
