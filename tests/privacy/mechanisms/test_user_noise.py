import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from tests.privacy.mechanisms.grid_support import on_grid
from tests.rounding import gamma
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.privacy.mechanisms.user_noise import AdaptiveClip, FixedClip, TreeNoise, UserNoise, rounds_per_epoch
from tff_pdp.privacy.mechanisms.user_queries import SeededAdaptiveClipSumQuery, SeededGaussianSumQuery, build_query
from tff_pdp.settings import read_settings

KINDS = [FixedClip(), AdaptiveClip(count_stddev=0.15), TreeNoise()]
# Clip norm 0.5, z = 4, a tenth of 200 users.
MECHANISM = UserMechanism(0.5, 4.0, 0.1, 20.0)
SEEDS = np.array([[1, 2], [3, 4]], np.int64)


def first_sum(noise, mechanism, records, num_values=3):
    query = build_query(noise, num_values, mechanism, SEEDS)
    state = query.initial_global_state()
    params = query.derive_sample_params(state)
    sample = query.initial_sample_state(tf.zeros([num_values]))
    for record in records:
        sample = query.accumulate_record(params, sample, tf.constant(record, tf.float32))
    return query.get_noised_result(sample, state)


def read(given):
    return read_settings(UserNoise, given, "test", "privacy.user_noise")


def test_each_kind_is_read_with_its_own_attributes():
    assert read({"kind": "fixed_clip"}) == FixedClip()
    assert read({"kind": "tree"}) == TreeNoise()
    given = {"kind": "adaptive_clip", "quantile": 0.9, "learning_rate": 1, "count_stddev": 0.1}
    assert read(given) == AdaptiveClip(quantile=0.9, learning_rate=1.0, count_stddev=0.1)
    assert read({"kind": "adaptive_clip"}) == AdaptiveClip(quantile=0.5, learning_rate=0.2, count_stddev=0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "fixed_clip, adaptive_clip, tree"),
        ({"kind": "laplace"}, "fixed_clip, adaptive_clip, tree"),
        ({"kind": ["tree"]}, "fixed_clip, adaptive_clip, tree"),
        ("tree", "must be a mapping .*, not 'tree'"),
        (None, "must be a mapping .*, not None"),
        ({"kind": "tree", "quantile": 0.5}, r"unknown key privacy\.user_noise\.quantile"),
        ({"kind": "fixed_clip", "clip": 1}, r"unknown key privacy\.user_noise\.clip"),
        ({"kind": "adaptive_clip", "quantile": "half"}, r"user_noise\.quantile must be .*, not 'half'"),
        ({"kind": "adaptive_clip", "quantile": 0}, r"user_noise\.quantile must be a number above 0 and below 1, not 0"),
        ({"kind": "adaptive_clip", "quantile": 1}, r"user_noise\.quantile must be a number above 0 and below 1, not 1"),
        ({"kind": "adaptive_clip", "quantile": math.nan}, r"user_noise\.quantile must be .*, not nan"),
        ({"kind": "adaptive_clip", "learning_rate": 0}, r"user_noise\.learning_rate must be a number above 0, not 0"),
        (
            {"kind": "adaptive_clip", "count_stddev": -0.1},
            r"user_noise\.count_stddev must be a number above 0, not -0\.1",
        ),
    ],
)
def test_what_cannot_be_read_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        read(given)


@pytest.mark.parametrize("noise", KINDS)
def test_every_value_of_a_sum_is_noised(noise):
    total = first_sum(noise, MECHANISM, [], 20_000)[0].numpy()
    # With s_b = 3, the sum's own part of 1/16 is 1/16 - 1/36.
    z = (1 / 16 - 1 / 36) ** -0.5 if isinstance(noise, AdaptiveClip) else 4.0
    assert abs(total.std() - z * 0.5) < 3 * z * 0.5 / math.sqrt(2 * total.size)
    assert total.all()


@pytest.mark.parametrize("noise", KINDS)
def test_no_noise_is_no_noise_whatever_the_clip(noise):
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=0.0)
    total = first_sum(noise, mechanism, [[0.3, 0.0, 0.0], [3.0, 0.0, 4.0]])[0]
    np.testing.assert_allclose(total, [0.6, 0.0, 0.4], rtol=0, atol=on_grid(0.5, 0.0, records=2) + gamma(2))


@pytest.mark.parametrize("noise", [FixedClip(), TreeNoise()])
def test_an_infinite_clip_without_noise_is_a_plain_sum(noise):
    mechanism = dataclasses.replace(MECHANISM, clip_norm=math.inf, noise_multiplier=0.0)
    total = first_sum(noise, mechanism, [[0.25, 0.0, 64.0], [3.0, 0.0, 4.0]])[0]
    np.testing.assert_array_equal(total, [3.25, 0.0, 68.0])


@pytest.mark.parametrize("noise", KINDS)
def test_a_mechanism_that_is_not_known_yet_gives_nothing_but_nan(noise):
    unset = UserMechanism(math.nan, math.nan, 0.1, math.nan)
    assert np.isnan(first_sum(noise, unset, [[1.0, 2.0, 3.0]])[0]).all()


@pytest.mark.parametrize(("z", "share"), [(4.0, 0.11), (4.0, 0.5), (0.9, 0.05), (12.0, 30.0)])
def test_sum_and_count_together_cost_what_one_sum_would(z, share):
    mechanism = UserMechanism(0.5, z, 0.1, 20.0)
    sum_multiplier = AdaptiveClip(count_stddev=share).sum_noise_multiplier(mechanism)
    assert sum_multiplier > z
    # Ten operations in float64, among them a difference that magnifies errors sixfold at most.
    assert (sum_multiplier**-2 + (2 * share * 20) ** -2) ** -0.5 == pytest.approx(z, rel=gamma(60, np.float64))


def test_a_query_of_an_adaptive_clip_has_both_noises_and_both_seeds():
    noise = AdaptiveClip(quantile=0.7, learning_rate=0.3, count_stddev=0.15)
    query = build_query(noise, 3, MECHANISM, SEEDS)
    assert isinstance(query, SeededAdaptiveClipSumQuery)
    state = query.initial_global_state()
    # Float64 that is stored as float32, once multiplied by the clip norm.
    assert float(state.noise_multiplier) == pytest.approx((1 / 16 - 1 / 36) ** -0.5, rel=gamma(2))
    assert float(state.sum_state.stddev) == pytest.approx(0.5 * (1 / 16 - 1 / 36) ** -0.5, rel=gamma(3))
    quantile = state.quantile_estimator_state
    assert float(quantile.target_quantile) == np.float32(0.7)
    assert float(quantile.learning_rate) == np.float32(0.3)
    assert float(quantile.below_estimate_state.denominator) == 20.0
    assert float(quantile.below_estimate_state.numerator_state.stddev) == pytest.approx(3.0, rel=gamma(2))
    np.testing.assert_array_equal(state.sum_state.seed, SEEDS[0])
    np.testing.assert_array_equal(quantile.below_estimate_state.numerator_state.seed, SEEDS[1])


@pytest.mark.parametrize("share", [0.1, 0.05])
def test_too_little_noise_on_the_count_is_refused_with_an_amount_that_is_enough(share):
    with pytest.raises(BudgetError, match=r"privacy\.user_noise\.count_stddev .* set it to at least 0\.12$"):
        AdaptiveClip(count_stddev=share).sum_noise_multiplier(MECHANISM)
    with pytest.raises(BudgetError, match="count_stddev"):
        build_query(AdaptiveClip(count_stddev=share), 3, MECHANISM, SEEDS)
    assert math.isfinite(AdaptiveClip(count_stddev=0.12).sum_noise_multiplier(MECHANISM))


def test_a_fixed_clip_takes_the_first_seed():
    query = build_query(FixedClip(), 3, MECHANISM, SEEDS)
    assert isinstance(query, SeededGaussianSumQuery)
    state = query.initial_global_state()
    assert (float(state.l2_norm_clip), float(state.stddev)) == (0.5, 2.0)
    np.testing.assert_array_equal(state.seed, SEEDS[0])


@pytest.mark.parametrize("noise", KINDS)
def test_the_first_seed_decides_the_noise_on_the_sum_and_the_second_that_on_the_count(noise):
    def noised(*seeds):
        query = build_query(noise, 50, MECHANISM, np.array(seeds, np.int64))
        state = query.initial_global_state()
        total, state, _ = query.get_noised_result(query.initial_sample_state(tf.zeros([50])), state)
        clip_norm = float(state.sum_state.l2_norm_clip) if isinstance(noise, AdaptiveClip) else 0.5
        return total.numpy(), clip_norm

    (total, clip_norm), (other_sum, same_clip), (same_sum, other_clip) = (
        noised(*seeds) for seeds in (([1, 2], [3, 4]), ([1, 9], [3, 4]), ([1, 2], [3, 9]))
    )
    assert not np.isclose(total, other_sum).all()
    assert clip_norm == same_clip
    np.testing.assert_array_equal(total, same_sum)
    assert (clip_norm != other_clip) == isinstance(noise, AdaptiveClip)


def test_a_tree_lasts_an_epoch():
    query = build_query(TreeNoise(), 3, dataclasses.replace(MECHANISM, sampling_rate=0.3), SEEDS)
    state = query.initial_global_state()
    rounds, nodes = [], []
    for _ in range(9):
        rounds.append(int(state.rounds))
        nodes.append(int(state.draws))
        # Nothing of a tree is left in the next.
        assert bool(tf.reduce_any(state.before != 0)) == bool(tf.reduce_any(state.left != 0)) == (state.rounds > 0)
        _, state, _ = query.get_noised_result(tf.zeros([3], tf.float64), state)
    assert rounds == [0, 1, 2, 3] * 2 + [0]
    # Nodes that are complete with a round: one, two, one and three.
    assert np.diff(nodes).tolist() == [1, 2, 1, 3] * 2


def test_an_epoch_is_as_many_rounds_as_it_takes_for_all_users_to_have_their_turn():
    for users in range(1, 150):
        for per_round in range(1, users + 1):
            assert rounds_per_epoch(per_round / users) == math.ceil(Fraction(users, per_round))
    for rounds in (10**4, 10**6, 10**7 + 1):
        assert rounds_per_epoch(1 / rounds) == rounds
    assert rounds_per_epoch(1.0) == 1
    assert rounds_per_epoch(0.7) == 2
