"""Slots are filled evenly, by ids and the seed alone."""

import hashlib

import numpy as np
import pytest

from beam_pipelines.contact_graph import sampling
from beam_pipelines.contact_graph.sampling import Contacts, Pairs, merge_pairs, sample_pairs
from beam_pipelines.keyed_hash import hexadecimal_names, keyed_uint64
from tests.beam_pipelines.contact_graph.graph_support import hash_by_hand, name_by_hand

IDS = np.array([3, 0, 2**40, -5, 2**62, 17])


def test_hash_is_that_of_plain_integers():
    found = keyed_uint64(7, "contacts", IDS, IDS[::-1].copy())
    expected = [hash_by_hand(7, "contacts", *pair) for pair in zip(IDS.tolist(), IDS[::-1].tolist(), strict=True)]
    assert found.tolist() == expected
    assert hexadecimal_names(7, "row", IDS).astype(str).tolist() == [
        name_by_hand(7, "row", pid) for pid in IDS.tolist()
    ]


def test_finaliser_is_that_of_splitmix64():
    # The first numbers of the generator seeded with 0, as published with it: state k times the golden gamma.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    start = int.from_bytes(hashlib.blake2b(b"x", digest_size=8, key=b"0").digest(), "little")
    state = [(number * 0x9E3779B97F4A7C15 - start) % 2**64 for number in range(3)]
    ids = np.array(state, np.uint64).view(np.int64)
    assert keyed_uint64(0, "x", ids).tolist() == published


def test_ids_are_left_as_they_were():
    ids = IDS.copy()
    keyed_uint64(0, "x", ids, ids)
    assert (ids == IDS).all()


def test_neighbours_are_sampled_evenly():
    # Somebody met ten people and has three slots: each of them holds each of the ten as often as the others.
    num_seeds, num_neighbours, num_slots = 2000, 10, 3
    ids = np.arange(100, 100 + num_neighbours + 1)
    pairs = pairs_of([0] * num_neighbours, range(1, num_neighbours + 1))
    counts = np.zeros((num_slots, num_neighbours), np.int64)
    for seed in range(num_seeds):
        chosen = sample_pairs(pairs, num_slots, seed, ids[:1], ids)
        counts[chosen.slot, chosen.other - 1] += 1
    assert counts.sum() == num_seeds * num_slots
    expected = num_seeds / num_neighbours
    for slot in counts:
        # 9 degrees of freedom: 27.9 is exceeded once in a thousand.
        assert ((slot - expected) ** 2 / expected).sum() < 27.9
    # People who met the same others choose independently: of 3 slots, 0.9 agree on average.
    both = pairs_of([0] * num_neighbours + [1] * num_neighbours, [*range(2, 12)] * 2)
    agree = 0
    for seed in range(num_seeds):
        chosen = sample_pairs(both, num_slots, seed, np.array([100, 101]), np.arange(100, 112))
        agree += len(set(chosen.other[chosen.owner == 0]) & set(chosen.other[chosen.owner == 1]))
    assert agree / num_seeds == pytest.approx(0.9, abs=5 * np.sqrt(0.49 / num_seeds))


def test_order_of_contacts_does_not_matter():
    generator = np.random.default_rng(0)
    contacts = random_contacts(generator, 400, num_owners=15, num_people=40)
    order = generator.permutation(400)
    for first, second in zip(
        sampled(contacts), sampled(Contacts(*(values[order] for values in contacts))), strict=True
    ):
        np.testing.assert_array_equal(first, second)


def test_all_bits_of_a_hash_decide_however_many_people_there_are(monkeypatch):
    # Three priorities that differ in the last bits alone, the smallest last.
    priorities = np.array([2**63 + 2, 2**63 + 1, 2**63], np.uint64)
    monkeypatch.setattr(sampling, "keyed_uint64", lambda *arguments: priorities)
    pairs = pairs_of([0, 0, 0], [1, 2, 3])
    ids = np.arange(4)
    for num_people in (1, 2**20):
        own_ids = np.arange(num_people)
        assert sample_pairs(pairs, 2, 0, own_ids, ids).other.tolist() == [3, 2]


def test_slots_are_those_of_a_loop_over_people():
    contacts = random_contacts(np.random.default_rng(1), 300, num_owners=9, num_people=30)
    pids = 1000 + np.arange(30) * 7
    merged, pairs = merge_pairs(contacts, 30), sampled(contacts, num_slots=4, pids=pids)
    rows = list(zip(*(values.tolist() for values in pairs), strict=True))
    met = {}
    for owner, other, start, duration, activity in zip(*(values.tolist() for values in contacts), strict=True):
        met.setdefault(owner, {}).setdefault(other, []).append((start, duration, activity))
    expected = []
    for owner, others in sorted(met.items()):
        own = int(pids[owner])
        for slot, other in enumerate(sorted(others, key=lambda o: hash_by_hand(3, "contacts", own, int(pids[o])))[:4]):
            starts, durations, activities = zip(*others[other], strict=True)
            flags = sum(2 ** (activity - 1) for activity in set(activities))
            expected.append((owner, other, slot, min(starts), sum(durations), len(starts), flags))
    assert rows == expected
    degrees = np.bincount(merged.owner, minlength=10).tolist()
    assert degrees == [len(met.get(owner, ())) for owner in range(10)]
    assert max(degrees) > 4 and max(merged.count) > 1


def test_long_durations_do_not_overflow():
    most = np.iinfo(np.int32).max
    contacts = Contacts(*np.array([[0] * 3, [1] * 3, [0] * 3, [most] * 3, [1] * 3], np.int32))
    contacts = contacts._replace(owner=contacts.owner.astype(np.int64), other=contacts.other.astype(np.int64))
    assert merge_pairs(contacts, 2).duration.tolist() == [3 * most]


def test_ties_go_by_place(monkeypatch):
    monkeypatch.setattr(
        "beam_pipelines.contact_graph.sampling.keyed_uint64",
        lambda seed, purpose, own, other: np.zeros(len(own), np.uint64),
    )
    pairs = sample_pairs(pairs_of([0, 0, 0, 1, 1], [1, 4, 9, 0, 2]), 2, 0, IDS[:2], np.arange(10))
    assert (pairs.owner.tolist(), pairs.other.tolist(), pairs.slot.tolist()) == (
        [0, 0, 1, 1],
        [1, 4, 0, 2],
        [0, 1, 0, 1],
    )


@pytest.mark.parametrize("num_slots", [0, 1, 5])
def test_nobody_and_nothing(num_slots):
    empty = Contacts(*(np.zeros(0, np.int64) for _ in range(5)))
    for num_owners in (0, 3):
        pairs = sample_pairs(merge_pairs(empty, 10), num_slots, 0, np.arange(num_owners), np.arange(10))
        assert [len(values) for values in pairs] == [0] * 7


def sampled(contacts, num_slots=4, pids=None):
    pids = 1000 + np.arange(40) * 7 if pids is None else pids
    return sample_pairs(merge_pairs(contacts, len(pids)), num_slots, 3, pids[:15], pids)


def pairs_of(owner, other):
    owner, other = np.array(owner), np.array(other)
    return Pairs(owner, other, *(np.zeros(len(owner), np.int64) for _ in range(5)))


def random_contacts(generator, size, num_owners, num_people):
    owner = generator.integers(0, num_owners, size)
    return Contacts(
        owner,
        (owner + generator.integers(1, num_people, size)) % num_people,
        generator.integers(0, 86_400, size).astype(np.int32),
        generator.integers(0, 9000, size).astype(np.int32),
        generator.integers(1, 8, size).astype(np.int8),
    )
