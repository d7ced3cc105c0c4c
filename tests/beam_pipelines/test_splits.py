"""Who goes into which split: expected shares by hash, exact shares by rank, and what the source states itself."""

import itertools

import numpy as np
import pytest

from beam_pipelines.rules import SplitRule, keyed_hash


def names(count):
    return np.array([b"%04d" % number for number in range(count)], "S32")


def divide(rule, ids, is_test=None, is_validation=None, client="someone"):
    """The names in each split."""
    stated = (None if one is None else np.array(one) for one in (is_test, is_validation))
    places = rule.divide(client, ids, *stated)
    return {split: ids[members].tolist() for split, members in places.items()}


def sizes(splits):
    return {split: len(members) for split, members in splits.items()}


@pytest.mark.parametrize(
    ("count", "test_fraction", "validation_fraction", "expected"),
    [
        (22, 0.2, 0.0, {"train": 17, "validation": 0, "test": 5}),
        (251, 0.2, 0.1, {"train": 174, "validation": 26, "test": 51}),
        (4, 0.25, 0.25, {"train": 2, "validation": 1, "test": 1}),
        # In binary arithmetic 0.07 * 100 is 7.000000000000001.
        (100, 0.07, 0.0, {"train": 93, "validation": 0, "test": 7}),
        (1, 0.2, 0.2, {"train": 0, "validation": 0, "test": 1}),
        (0, 0.2, 0.2, {"train": 0, "validation": 0, "test": 0}),
    ],
)
def test_exact_shares_are_rounded_up(count, test_fraction, validation_fraction, expected):
    rule = SplitRule(test_fraction, validation_fraction, exact=True, seed=0)
    assert sizes(divide(rule, names(count))) == expected


def test_exact_shares_go_by_keyed_hash():
    given = names(10)
    by_hash = sorted(given.tolist(), key=lambda name: keyed_hash(3, "split", name))
    splits = divide(SplitRule(0.2, 0.3, exact=True, seed=3), given[::-1])
    for split, members in (("test", by_hash[:2]), ("validation", by_hash[2:5]), ("train", by_hash[5:])):
        assert set(splits[split]) == set(members)


@pytest.mark.parametrize("exact", [False, True])
def test_every_example_is_in_one_split_and_the_seed_decides(exact):
    divided = [divide(SplitRule(0.3, 0.2, exact, seed), names(100)) for seed in (0, 0, 1)]
    assert divided[0] == divided[1] != divided[2]
    for splits in divided:
        assert sorted(itertools.chain(*splits.values())) == names(100).tolist()
        assert all(members == sorted(members) for members in splits.values())


@pytest.mark.parametrize(("exact", "validation"), [(True, 30), (False, None)])
def test_stated_test_examples_stay_and_validation_is_a_share_of_the_others(exact, validation):
    stated = [number % 3 == 0 for number in range(450)]
    splits = divide(SplitRule(0.9, 0.1, exact, seed=0), names(450), stated)
    assert splits["test"] == [b"%04d" % number for number in range(0, 450, 3)]
    if validation is not None:
        assert len(splits["validation"]) == validation
    # By hash: 300 draws with probability 0.1, within four standard deviations.
    assert abs(len(splits["validation"]) - 30) < 21
    assert len(splits["train"]) == 300 - len(splits["validation"])


def test_by_hash_no_example_moves_when_others_leave():
    rule = SplitRule(0.2, 0.2, exact=False, seed=0)
    everyone, fewer = divide(rule, names(200)), divide(rule, names(200)[::2])
    for split, members in fewer.items():
        assert members and set(members) <= set(everyone[split])


@pytest.mark.parametrize("exact", [False, True])
def test_a_source_that_states_all_three_splits(exact):
    rule = SplitRule(0.5, 0.4, exact=exact, seed=0)
    is_test, is_validation = [True, False, False, True], [False, True, False, False]
    assert divide(rule, names(4), is_test, is_validation) == {
        "train": [b"0002"],
        "validation": [b"0001"],
        "test": [b"0000", b"0003"],
    }


def test_by_user_all_of_a_clients_examples_are_in_one_split():
    rule = SplitRule(0.3, 0.2, exact=False, seed=0, by_user=True)
    counted = dict.fromkeys(("train", "validation", "test"), 0)
    for client in range(500):
        (split,) = (split for split, members in divide(rule, names(3), client=str(client)).items() if members)
        assert len(divide(rule, names(3), client=str(client))[split]) == 3
        counted[split] += 1
    # Within four standard deviations of 250, 100 and 150.
    assert abs(counted["train"] - 250) < 45 and abs(counted["validation"] - 100) < 36
