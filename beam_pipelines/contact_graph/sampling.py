"""Chooses which contacts fill the slots of a person's row.

The choice depends on the seed and on the ids of the person and of its contacts: on all 64 bits of a keyed hash, and so
not on the number of people in a partition. Equal hashes are decided by people's order by silo, split and id. Contacts
are of one silo and the split is a hash of the id, so that the order depends on nobody else either.
"""

from typing import NamedTuple

import numpy as np

from beam_pipelines.keyed_hash import keyed_uint64


class Contacts(NamedTuple):
    """Single contacts as one end sees them: arrays `[n]`.

    Attributes:
      owner: whose row, counted from the first person of the partition: int64.
      other: who was met, a place among all people: int64.
      start: seconds since midnight: int32.
      duration: seconds: int32.
      activity: the owner's, 1 to 7: int8.
    """

    owner: np.ndarray
    other: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    activity: np.ndarray


class Pairs(NamedTuple):
    """All contacts with one other person taken together: arrays `[pairs]`, sorted by owner.

    Attributes:
      owner: as in `Contacts`.
      other: as in `Contacts`.
      slot: place in the row, from 0.
      start: of the earliest contact in the day.
      duration: of all contacts.
      count: how many there are.
      activities: bit a - 1 is set where the owner's activity was a: uint8.
    """

    owner: np.ndarray
    other: np.ndarray
    slot: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    count: np.ndarray
    activities: np.ndarray


def merge_pairs(contacts: Contacts, num_people: int) -> Pairs:
    """Merges each owner's contacts, in any order, with each of `num_people` others; `slot` is the rank by place."""
    key = contacts.owner * num_people + contacts.other
    order = np.argsort(key)
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    owner, other = key[first] // num_people, key[first] % num_people
    flags = np.left_shift(np.uint8(1), (contacts.activity[order] - 1).astype(np.uint8))
    return Pairs(
        owner,
        other,
        _ranks(owner),
        np.minimum.reduceat(contacts.start[order], first),
        np.add.reduceat(contacts.duration[order], first, dtype=np.int64),
        np.diff(first, append=len(key)),
        np.bitwise_or.reduceat(flags, first),
    )


def share_repeated(contacts: Contacts) -> float:
    """Returns the share of contacts that repeat another one in everything."""
    if not len(contacts.owner):
        return 0.0
    # By hashes, of which two are equal by chance for one pair in 2^64.
    hashes = np.sort(keyed_uint64(0, "contact", *(values.astype(np.int64) for values in contacts)))
    return float(np.mean(hashes[1:] == hashes[:-1])) if len(hashes) > 1 else 0.0


def sample_pairs(pairs: Pairs, num_slots: int, seed: int, own_ids: np.ndarray, ids: np.ndarray) -> Pairs:
    """Samples for each owner the `num_slots` pairs with the smallest keyed hashes of both ids, ties by place.

    Args:
      pairs: sorted by owner and other.
      num_slots: S, the most pairs of an owner.
      seed: keys the hash.
      own_ids: int64 `[owners]`, ids of the partition's people.
      ids: int64 `[people]`, of all people.
    """
    priority = keyed_uint64(seed, "contacts", own_ids[pairs.owner], ids[pairs.other])
    # Stable: places decide between equal priorities.
    order = np.lexsort((priority, pairs.owner))
    ranks = _ranks(pairs.owner)
    chosen = order[ranks < num_slots]
    return Pairs(*(values[chosen] for values in pairs))._replace(slot=ranks[ranks < num_slots])


def _ranks(owners: np.ndarray) -> np.ndarray:
    """Returns the rank of each row among those of its owner, for sorted owners."""
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    return np.arange(len(owners)) - np.repeat(first, np.diff(first, append=len(owners)))
