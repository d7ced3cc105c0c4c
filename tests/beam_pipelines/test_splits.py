"""Who goes into which split: expected shares by hash, exact shares by rank, and what the source states itself."""

import itertools

import numpy as np
import pytest

from beam_pipelines.schema import Example
from beam_pipelines.splits import SplitRule, keyed_hash


def examples(count, is_test=None):
    stated = is_test or [None] * count
    return [Example(b"%04d" % number, np.zeros(1, np.float32), 0, flag) for number, flag in enumerate(stated)]


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
    assert sizes(rule.divide(examples(count))) == expected


def test_exact_shares_go_by_keyed_hash():
    given = examples(10)
    by_hash = sorted(given, key=lambda example: keyed_hash(3, "split", example.example_id))
    splits = SplitRule(0.2, 0.3, exact=True, seed=3).divide(given[::-1])
    for split, members in (("test", by_hash[:2]), ("validation", by_hash[2:5]), ("train", by_hash[5:])):
        assert {example.example_id for example in splits[split]} == {example.example_id for example in members}


@pytest.mark.parametrize("exact", [False, True])
def test_every_example_is_in_one_split_and_the_seed_decides(exact):
    divided = [SplitRule(0.3, 0.2, exact, seed).divide(examples(100)) for seed in (0, 0, 1)]
    identifiers = [
        {split: [example.example_id for example in members] for split, members in splits.items()} for splits in divided
    ]
    assert identifiers[0] == identifiers[1] != identifiers[2]
    for splits in identifiers:
        assert sorted(itertools.chain(*splits.values())) == [example.example_id for example in examples(100)]
        assert all(members == sorted(members) for members in splits.values())


@pytest.mark.parametrize(("exact", "validation"), [(True, 30), (False, None)])
def test_stated_test_examples_stay_and_validation_is_a_share_of_the_others(exact, validation):
    stated = [number % 3 == 0 for number in range(450)]
    splits = SplitRule(0.9, 0.1, exact, seed=0).divide(examples(450, stated))
    assert [example.example_id for example in splits["test"]] == [b"%04d" % number for number in range(0, 450, 3)]
    if validation is not None:
        assert len(splits["validation"]) == validation
    # By hash: 300 draws with probability 0.1, within four standard deviations.
    assert abs(len(splits["validation"]) - 30) < 21
    assert len(splits["train"]) == 300 - len(splits["validation"])


def test_by_hash_no_example_moves_when_others_leave():
    rule = SplitRule(0.2, 0.2, exact=False, seed=0)
    everyone, fewer = rule.divide(examples(200)), rule.divide(examples(200)[::2])
    for split, members in fewer.items():
        assert members and {x.example_id for x in members} <= {x.example_id for x in everyone[split]}
