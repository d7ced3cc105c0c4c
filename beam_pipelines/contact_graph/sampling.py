"""Chooses which contacts fill the slots of a person's row.

The choice depends only on the seed and on the ids of the person and of the people met. Each pair of the person and a
person met has a 64-bit hash of the seed and both ids. The pairs with the smallest hashes are chosen, whatever the
number of people in a partition. Between equal hashes, the order of people by silo, split and id decides. This order
depends on nobody else, because contacts are in one silo, and a person's split is chosen by a hash of the person's id.
"""

from typing import NamedTuple

import numpy as np

from beam_pipelines.keyed_hash import keyed_uint64


class Contacts(NamedTuple):
    """Contacts as arrays `[n]`; each contact is seen from one of the two people, the owner.

    Attributes:
      owner: person whose row the contact is for, as a position from the partition's first person, int64.
      other: person met by the owner, as a place among all people, int64.
      start: start of the contact in seconds since midnight, int32.
      duration: duration of the contact in seconds, int32.
      activity: activity of the owner, 1 to 7, int8.
    """

    owner: np.ndarray
    other: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    activity: np.ndarray


class Pairs(NamedTuple):
    """Pairs of an owner and a person met, with a summary of each pair's contacts, as arrays `[pairs]` sorted by owner.

    Attributes:
      owner: owner, as in `Contacts`.
      other: person met, as in `Contacts`.
      slot: position of the pair in the owner's row, from 0.
      start: start of the contact that begins earliest in the day, in seconds since midnight.
      duration: total duration of the pair's contacts in seconds.
      count: number of the pair's contacts.
      activities: uint8 with bit a - 1 set if the owner had activity a in one of the pair's contacts.
    """

    owner: np.ndarray
    other: np.ndarray
    slot: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    count: np.ndarray
    activities: np.ndarray


def merge_pairs(contacts: Contacts, num_people: int) -> Pairs:
    """Merges all contacts of an owner with one other person into one pair; sorts the pairs by owner and other.

    The result's `slot` numbers each owner's pairs in this order, from 0.

    Args:
      contacts: contacts in any order.
      num_people: number of all people; every place in `contacts.other` is below this number.
    """
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
    """Returns the share of contacts that repeat another contact exactly."""
    if not len(contacts.owner):
        return 0.0
    # Hashes are compared: two different contacts have equal hashes with probability 2^-64.
    hashes = np.sort(keyed_uint64(0, "contact", *(values.astype(np.int64) for values in contacts)))
    return float(np.mean(hashes[1:] == hashes[:-1])) if len(hashes) > 1 else 0.0


def sample_pairs(pairs: Pairs, num_slots: int, seed: int, own_ids: np.ndarray, ids: np.ndarray) -> Pairs:
    """Chooses for each owner the `num_slots` pairs whose two ids have the smallest keyed hashes.

    Between equal hashes, the smaller place in `pairs.other` decides.

    Args:
      pairs: pairs sorted by owner and other.
      num_slots: S, the largest number of pairs of an owner.
      seed: seed of the hash.
      own_ids: ids of the partition's people, int64 `[owners]`.
      ids: ids of all people, int64 `[people]`.
    """
    priority = keyed_uint64(seed, "contacts", own_ids[pairs.owner], ids[pairs.other])
    # The sort is stable: places decide between equal priorities.
    order = np.lexsort((priority, pairs.owner))
    ranks = _ranks(pairs.owner)
    chosen = order[ranks < num_slots]
    return Pairs(*(values[chosen] for values in pairs))._replace(slot=ranks[ranks < num_slots])


def _ranks(owners: np.ndarray) -> np.ndarray:
    """Returns the rank of each row among the rows of its owner, for sorted owners."""
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    return np.arange(len(owners)) - np.repeat(first, np.diff(first, append=len(owners)))
