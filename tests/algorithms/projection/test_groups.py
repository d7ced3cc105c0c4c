import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.algorithms.projection.groups import Groups, liberal_by_norm
from tff_pdp.errors import ConfigError


def rows_with_norms(norms):
    return collections.OrderedDict(w=tf.constant([[0.6 * norm, 0.8 * norm] for norm in norms], tf.float32))


def near(norm, count, seed=0):
    return norm * np.exp(0.03 * np.random.default_rng(seed).normal(size=count))


@pytest.mark.parametrize(
    ("norms", "liberal"),
    [
        pytest.param([*near(20, 9), 0.8], [9], id="nine and one"),
        pytest.param([*near(20, 5), *near(2.4, 4), 0.8], [9], id="three budgets"),
        pytest.param([*near(2.4, 9), 0.8], [9], id="a factor of three"),
        pytest.param([*near(20, 18), *near(0.8, 2)], [18, 19], id="eighteen and two"),
        pytest.param([*near(5, 10)], list(range(10)), id="one group: nobody is strict"),
        pytest.param([2.0] * 4, [0, 1, 2, 3], id="equal norms"),
        pytest.param([*near(20, 9), 0.0], [9], id="a silo that does not move"),
        pytest.param([*near(1, 9), np.inf], list(range(9)), id="a silo that has diverged"),
    ],
)
def test_groups_by_the_logarithms_of_norms(norms, liberal):
    found = liberal_by_norm(rows_with_norms(norms), tf.ones(len(norms)))
    np.testing.assert_array_equal(np.flatnonzero(found), liberal)


def test_raw_norms_in_two_groups_merge_two_of_three_budgets():
    norms = [*near(20, 5), *near(2.4, 4), 0.8]
    found = liberal_by_norm(rows_with_norms(norms), tf.ones(10), paper_raw_norms=True)
    np.testing.assert_array_equal(np.flatnonzero(found), [5, 6, 7, 8, 9])


def test_absent_silos_are_strict():
    present = tf.constant([1.0, 1, 1, 1, 1, 0])
    found = liberal_by_norm(rows_with_norms([20.0, 20.5, 19.6, 0.8, 0.81, 0.0]), present)
    np.testing.assert_array_equal(np.flatnonzero(found), [3, 4])


def groups(partition, **given):
    settings = {"liberal_share": 0.1, "liberal_epsilon": None, "paper_raw_norms": False, **given}
    return Groups(4, partition, **settings)


def decided(rule, epsilons):
    released = [rule.release({"budget_epsilon": tf.constant(epsilon, tf.float32)}) for epsilon in epsilons]
    stacked = {
        name: {"rows": tf.nest.map_structure(lambda *values: tf.stack(values), *[one[name] for one in released])}
        for name in rule.released
    }
    return rule.decide(stacked).numpy().tolist()


def test_the_server_knows_epsilons():
    epsilons = [1.0, 3.0, np.inf, 3.0]
    assert decided(groups("known"), epsilons) == [0, 0, 1, 0]
    # 0.3 of four silos, rounded up; of equal epsilons the first silo's counts.
    assert decided(groups("known", liberal_share=0.3), epsilons) == [0, 1, 1, 0]
    assert decided(groups("known", liberal_share=0.75), epsilons) == [0, 1, 1, 1]
    assert decided(groups("known", liberal_epsilon=3.0), epsilons) == [0, 1, 1, 1]


def test_silos_declare_a_bit_and_no_epsilon():
    rule = groups("declared", liberal_epsilon=3.0)
    assert set(rule.released) == {"liberal"}
    assert decided(rule, [1.0, 3.0, np.inf, 2.9]) == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"partition": "declared"}, "partition declared needs liberal_epsilon"),
        ({"partition": "by_norm", "liberal_epsilon": 1.0}, "liberal_epsilon is for partition known or declared"),
        ({"partition": "known", "paper_raw_norms": True}, "paper_raw_norms is for partition by_norm, not known"),
    ],
)
def test_settings_that_do_not_suit_each_other_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        groups(**given)


def test_few_liberal_silos_are_worth_a_warning():
    rule = groups("known")

    def said(*liberal):
        return rule.warning({"is_liberal": np.array(liberal, np.float32)})

    assert said(0, 0, 0, 1).startswith("1 of 4 silos are liberal: the shared model follows their data")
    assert said(0, 0, 1, 1).startswith("2 of 4 silos are liberal")
    assert said(0, 1, 1, 1) == ""
    assert said(0, 0, 0, 0).startswith("no silo is liberal, so that the shared model moves by the plain mean")
