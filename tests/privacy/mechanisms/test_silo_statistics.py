import json
import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest

from tests.rounding import gamma, standard_errors
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    calibrate_noise_multiplier,
    epsilon_bounds,
    poisson_gaussian_event,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import (
    ExponentialMechanismDpEvent,
    ParameterChoiceDpEvent,
    event_from_dict,
    event_to_dict,
)
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.mechanisms import silo_statistics
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws
from tff_pdp.privacy.mechanisms.silo_statistics import (
    MomentSettings,
    NoisedNumber,
    NumExamples,
    PublicNumber,
    SiloStatistics,
    StatisticsSettings,
    moment_steps,
    planned_events,
    release_silo_statistics,
    statistics_generator,
)
from tff_pdp.settings import read_settings

MOMENTS = MomentSettings(np.array([0.0, -2.0, 1.0]), np.array([1.0, 6.0, 70.0]), 1.5, 0.05)
EXTREMES = np.array(
    [
        [0, -2, 1],
        [1, 6, 70],
        [0.5, 2, 35.5],
        [1e38, -1e38, 3e38],
        [math.inf, -math.inf, math.inf],
        [math.nan, math.nan, math.nan],
        [math.nan, 7, 0.9],
        [0.5, 6, 35.5],
    ],
    np.float32,
)


def draws_of():
    return ExactDraws(b"a key of statistics")


def released_many_times(x, settings, times):
    draws = draws_of()
    return [release_silo_statistics(x, settings, draws) for _ in range(times)]


def step_of(settings):
    """Exactly, as whole steps are."""
    return Fraction(settings.stddev) / 2**GRID_BITS


def test_no_record_whatsoever_moves_the_sum_by_more_than_the_sensitivity():
    generator = np.random.default_rng(0)
    ordinary = generator.normal([0.5, 2, 35], [0.5, 4, 35], size=(40, 3)).astype(np.float32)
    records = np.concatenate([EXTREMES, ordinary])
    whole = moment_steps(records, MOMENTS)
    changes = [whole - moment_steps(np.delete(records, row, axis=0), MOMENTS) for row in range(len(records))]
    # In whole numbers there is nothing to be rounded.
    squares = [step_of(MOMENTS) ** 2 * sum(step**2 for step in change.ravel()) for change in changes]
    assert max(squares) <= 3
    # A smaller one would be wrong: records at the corners and in the middle move the sum by all of it.
    assert [float(square) for square in squares[:3]] == pytest.approx([3.0] * 3)


@pytest.mark.parametrize("noise_multiplier", [1e-12, 0.3, 1.0, 7.0, 1e6])
def test_at_any_noise_no_records_steps_are_longer_than_the_sensitivity(noise_multiplier):
    """Around every place where float64 rounds u^2 - 1: the exact squares of a record's steps add up to one at most."""
    settings = MomentSettings(np.array([-1.0]), np.array([1.0]), noise_multiplier, 0.05)
    values = [1.0, 0.5, 1 / 3, 0.1, 2.0**-26, 2.0**-27, 1e-8, 0.0, *np.random.default_rng(0).uniform(0, 1, 200)]
    beside = [np.nextafter(value, other) for value in values for other in (0.0, 1.0)]
    for value in (*values, *beside):
        first, second = moment_steps(np.array([[value]]), settings).ravel()
        assert (first**2 + second**2) * step_of(settings) ** 2 <= 1
        assert first >= 0 >= second


def test_steps_add_up_alike_in_blocks_and_in_any_order(monkeypatch):
    x = np.random.default_rng(0).uniform([0, -2, 1], [1, 6, 70], size=(100, 3))
    whole = moment_steps(x, MOMENTS)
    monkeypatch.setattr(silo_statistics, "_ROWS", 7)
    assert (moment_steps(x[::-1], MOMENTS) == whole).all()
    # So little noise that a sum of steps needs more than 64 bits.
    quiet = MomentSettings(MOMENTS.lower, MOMENTS.upper, 1e-13, 0.05)
    assert max(abs(moment_steps(x, quiet).ravel())) > 2**64
    assert (moment_steps(x[::-1], quiet) == moment_steps(x, quiet)).all()


def test_moments_by_hand():
    x = np.array([[[0.0, 10.0]], [[4.0, 20.0]]], np.float32)
    settings = MomentSettings(np.array([[0.0, 0.0]]), np.array([[4.0, 20.0]]), 1.0, 0.05)
    # Mapped to [-1, 1]: -1, 0 and 1, 1.
    steps = [[[0, math.floor((1 - 2**-48) / step_of(settings))]], [[0, -math.floor((1 - 2**-48) / step_of(settings))]]]
    assert moment_steps(x, settings).tolist() == steps
    assert float(steps[0][0][1] * step_of(settings)) == pytest.approx(1.0)
    quiet = MomentSettings(settings.lower, settings.upper, 1e-12, 0.05)
    released = release_silo_statistics(x, StatisticsSettings(moments=quiet), draws_of())
    assert released.num_examples == 2
    assert released.mean == pytest.approx((2.0, 15.0))
    assert released.stddev == pytest.approx((2.0, 5.0))


def test_the_noise_is_what_the_event_says_and_the_moments_are_unbiased():
    generator = np.random.default_rng(1)
    n, times = 500, 4000
    x = generator.uniform([0.2, 0, 20], [0.9, 5, 60], size=(n, 3)).astype(np.float32)
    released = released_many_times(x, StatisticsSettings(moments=MOMENTS), times)
    half_range, middle = (MOMENTS.upper - MOMENTS.lower) / 2, (MOMENTS.lower + MOMENTS.upper) / 2
    first = (np.array([each.mean for each in released]) - middle) / half_range
    second = (np.array([each.stddev for each in released]) / half_range) ** 2 + first**2
    [(event, _)] = released[0].events
    expected = event.noise_multiplier * MOMENTS.sensitivity / n
    noise = np.concatenate([first, second], axis=1)
    assert noise.std(axis=0) == pytest.approx(np.full(6, expected), rel=standard_errors(6) / math.sqrt(2 * times))
    u = (x.astype(np.float64) - middle) / half_range
    exact = np.concatenate([u.mean(axis=0), (u**2).mean(axis=0)])
    assert np.abs(noise.mean(axis=0) - exact).max() < 5 * expected / math.sqrt(times)
    # Each coordinate has a noise of its own.
    assert np.abs(np.corrcoef(noise.T) - np.eye(6)).max() < 5 / math.sqrt(times)


def test_the_noised_count_is_discrete_laplace_noise_around_the_truth():
    times, epsilon = 20000, 0.2
    released = released_many_times(np.zeros([300, 2]), StatisticsSettings(count_epsilon=epsilon), times)
    error = np.array([each.num_examples for each in released]) - 300
    assert all(isinstance(each.num_examples, int) for each in released[:10])
    ratio = math.exp(-epsilon)
    variance = 2 * ratio / (1 - ratio) ** 2
    assert abs(error.mean()) < 5 * math.sqrt(variance / times)
    # A Laplace variable's fourth moment is 24 times the fourth power of its scale: kurtosis 6.
    assert error.var() == pytest.approx(variance, rel=standard_errors() * math.sqrt(5 / times))
    share = 2 * ratio**11 / (1 + ratio)
    by_chance = standard_errors() * math.sqrt(share * (1 - share) / times)
    assert np.mean(np.abs(error) > 10.5) == pytest.approx(share, abs=by_chance)


def test_a_count_is_never_below_one():
    released = released_many_times(np.zeros([0, 2]), StatisticsSettings(count_epsilon=0.5), 200)
    assert min(each.num_examples for each in released) == 1
    empty = release_silo_statistics(np.zeros([0, 3]), StatisticsSettings(moments=MOMENTS), draws_of())
    assert empty.num_examples == 1 and np.isfinite(empty.mean + empty.stddev).all()


def test_moments_are_divided_by_the_noised_count():
    settings = StatisticsSettings(
        count_epsilon=0.05, moments=MomentSettings(np.array([-1.0]), np.array([1.0]), 1e-9, 0.05)
    )
    x = np.full([100, 1], 0.25, np.float32)
    for released in released_many_times(x, settings, 20):
        # The noise is 1e-9 of a sum of 25.
        assert released.mean == pytest.approx((min(1.0, 25 / released.num_examples),), rel=1e-9)


def test_noise_cannot_make_a_feature_explode_or_leave_its_bounds():
    loud = MomentSettings(MOMENTS.lower, MOMENTS.upper, 50.0, 0.05)
    width = MOMENTS.upper - MOMENTS.lower
    stddevs = []
    for released in released_many_times(np.full([20, 3], 0.5, np.float32), StatisticsSettings(moments=loud), 200):
        assert (MOMENTS.lower <= released.mean).all() and (released.mean <= MOMENTS.upper).all()
        stddevs.append(released.stddev / width)
    # A share of the width; half of it is the largest deviation that values within bounds can have.
    assert np.min(stddevs) == pytest.approx(0.05)
    assert np.max(stddevs) <= 0.5 * (1 + gamma(4, np.float64))


def test_what_is_charged_is_known_before_anything_is_released():
    settings = StatisticsSettings(count_epsilon=0.1, moments=MOMENTS)
    planned = planned_events(settings)
    assert [event for event, _ in planned] == [ParameterChoiceDpEvent(0.1), dp_accounting.GaussianDpEvent(1.5)]
    for x in (np.zeros([5, 3]), EXTREMES):
        assert release_silo_statistics(x, settings, draws_of()).events == planned
    assert planned_events(StatisticsSettings()) == ()
    nothing = release_silo_statistics(np.zeros([5, 3]), StatisticsSettings(), draws_of())
    assert nothing == SiloStatistics(num_examples=5)


def test_training_and_statistics_together_stay_within_the_budget():
    budget = SiloBudget(2.0, 1e-5)
    events = planned_events(
        StatisticsSettings(count_epsilon=0.1, moments=MomentSettings(np.zeros(3), np.ones(3), 20.0, 0.05))
    )
    noise_multiplier = calibrate_noise_multiplier(2.0, 1e-5, 0.2, 50, [event for event, _ in events])
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"a": budget})
    for event, reason in events:
        ledger.append("a", event, reason=reason)
    ledger.append("a", poisson_gaussian_event(0.2, noise_multiplier, 1), 50)
    assert 1.99 < ledger.epsilon("a").best <= 2.0
    assert Ledger.from_json(ledger.to_json()).epsilon("a") == ledger.epsilon("a")


def test_the_epsilon_of_a_choice_adds_to_that_of_what_follows():
    following = poisson_gaussian_event(0.1, 2.0, 100)
    # A choice's privacy loss is rounded up to the grid; of the rest that of each of 100 steps is.
    grid = 1e-4
    alone = epsilon_bounds(following, 1e-5, discretisation=grid)
    both = epsilon_bounds(
        dp_accounting.ComposedDpEvent([ParameterChoiceDpEvent(0.3), following]), 1e-5, discretisation=grid
    )
    assert both.rdp == pytest.approx(alone.rdp + 0.3, rel=gamma(100, np.float64))
    assert both.pld == pytest.approx(alone.pld + 0.3, abs=2 * grid)
    assert both.pld > alone.pld + 0.3 - 1e-6
    only = epsilon_bounds(ParameterChoiceDpEvent(0.3), 1e-5, discretisation=grid)
    assert only.best == pytest.approx(0.3, abs=grid)
    event = ParameterChoiceDpEvent(0.3)
    assert event_from_dict(json.loads(json.dumps(event_to_dict(event)))) == event


def test_mechanisms_chosen_by_a_noised_number_can_break_what_each_of_them_keeps():
    """Why the count is not charged as a Laplace event: with the choice, delta exceeds what both choices keep."""
    epsilon, delta, of_choice = 1.0, 0.01, 0.2
    high = 1 / (1 + math.exp(-of_choice))

    # Randomised response tells "high" or "low". After "high" comes another randomised response, whose epsilon is such
    # that the two together just keep (epsilon, delta); after "low", all is told with probability delta.
    def delta_of_pair(second):
        true = 1 / (1 + math.exp(-second))
        return high * true * max(0.0, 1 - math.exp(epsilon - of_choice - second))

    second = np.linspace(0.8, 1.0, 200001)
    second = float(second[np.searchsorted([delta_of_pair(each) for each in second], delta) - 1])
    pair = [ExponentialMechanismDpEvent(of_choice), ExponentialMechanismDpEvent(second)]
    # Both losses are rounded up to the grid, and the second epsilon down to one of its own.
    grid = 1e-5
    assert epsilon_bounds(dp_accounting.ComposedDpEvent(pair), delta, discretisation=grid).pld <= epsilon + 2 * grid
    chosen_by_outcome = delta_of_pair(second) + (1 - high) * delta
    assert chosen_by_outcome > 1.4 * delta
    # As the choice is charged here, the second mechanism does not fit.
    charged = [ParameterChoiceDpEvent(of_choice), ExponentialMechanismDpEvent(second)]
    assert epsilon_bounds(dp_accounting.ComposedDpEvent(charged), delta).best > epsilon + 0.01


def test_statistics_survive_json_exactly():
    settings = StatisticsSettings(count_epsilon=0.1, moments=MOMENTS)
    for stored in (
        release_silo_statistics(EXTREMES, settings, draws_of()),
        SiloStatistics(num_examples=12),
    ):
        assert SiloStatistics.from_dict(json.loads(json.dumps(stored.to_dict()))) == stored


@pytest.mark.parametrize(
    "stored", [{}, {"num_examples": 3, "mean": None, "stddev": None}, [], {"num_examples": "many"}]
)
def test_other_things_are_no_statistics(stored):
    with pytest.raises(ConfigError, match="Not the stored statistics of a silo"):
        SiloStatistics.from_dict(stored)


def test_noise_comes_from_entropy_unless_a_test_seed_is_given():
    def draw(silo, seed):
        return statistics_generator(silo, seed).gaussian_floor(3).tolist()

    assert draw("a", None) != draw("a", None)
    assert draw("a", 1) == draw("a", 1)
    assert draw("a", 1) != draw("b", 1) and draw("a", 1) != draw("a", 2)


def read_num_examples(content):
    return read_settings(NumExamples, content, "test", "privacy.num_examples")


def test_the_number_of_examples_is_public_or_costs():
    public, noised = (read_num_examples(one) for one in ({"kind": "public"}, {"kind": "noised", "epsilon": 5e-2}))
    assert (public, public.epsilon) == (PublicNumber(), None)
    assert (noised, noised.epsilon) == (NoisedNumber(epsilon=0.05), 0.05)


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, r"missing key privacy\.num_examples\.kind: one of public, noised"),
        ("public", r"privacy\.num_examples must be a mapping .*, not 'public'"),
        ({"kind": "noisy"}, r"num_examples\.kind must be one of public, noised, not 'noisy'"),
        ({"kind": "public", "epsilon": 1}, r"unknown key privacy\.num_examples\.epsilon"),
        ({"kind": "noised"}, r"missing key privacy\.num_examples\.epsilon"),
        ({"kind": "noised", "epsilon": 0}, r"num_examples\.epsilon must be a number above 0, not 0"),
        ({"kind": "noised", "epsilon": math.inf}, r"num_examples\.epsilon must be a number above 0, not inf"),
    ],
)
def test_errors_name_the_key(config, message):
    with pytest.raises(ConfigError, match=message):
        read_num_examples(config)
