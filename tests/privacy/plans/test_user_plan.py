"""User-level plans: noise for a budget, charges, cohorts as they are accounted for, warnings and claims."""

import dataclasses
import math
import time
import tracemalloc
from collections import Counter

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import dp_event
from scipy import optimize, special, stats

from tests.privacy.accounting.anchor_support import CALIBRATED
from tests.rounding import as_printed, gamma
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent, grid_distance
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.privacy.mechanisms.user_noise import AdaptiveClip, FixedClip, TreeNoise
from tff_pdp.privacy.plans.plan import DRAWN_NOISE, PlannedTraining
from tff_pdp.privacy.plans.search import Search
from tff_pdp.privacy.plans.unprotected import Unprotected, without_privacy
from tff_pdp.privacy.plans.user import USERS, User, UserPlan
from tff_pdp.settings import read_settings


def budget(epsilon, delta=1e-5):
    return {"kind": "one_for_all", "epsilon": epsilon, "delta": delta}


SETTINGS = {"kind": "user", "batch_size": 10, "clip_norm": 0.5, "budgets": budget(1.0), "users_per_round": 20.0}
TREE = {"kind": "tree"}
KEY = RunKey.from_test_seed(3)


def training(num_users=200, rounds=100, num_released=1000, **changes):
    sizes = {f"user {index}": 5 for index in range(num_users)}
    return PlannedTraining(sizes, dict.fromkeys(sizes, 1), rounds, num_released=num_released, **changes)


def read(**changes):
    return read_settings(User, {**SETTINGS, **changes}, "test", "privacy")


def read_unprotected(**changes):
    without = {"kind": "none", "unit": "user", "batch_size": 10, "users_per_round": 20.0}
    return read_settings(Unprotected, {**without, **changes}, "test", "privacy")


def build(planned=None, **changes):
    return read(**changes).build(planned or training())


def plan_of(q=0.1, z=5.0, rounds=100, num_users=200, epsilon=50.0, noise=None, **changes):
    """A plan as it is, without calibration."""
    noise = noise or FixedClip()
    given = {
        "unit": "user",
        "adjacency": Adjacency.REPLACE_SPECIAL if isinstance(noise, TreeNoise) else Adjacency.ADD_OR_REMOVE_ONE,
        "claim": "formal",
        "claim_reason": "",
        "budgets": {USERS: SiloBudget(epsilon, 1e-5)},
        "rounds": rounds,
        "batch_size": 10,
        "mechanism": UserMechanism(1.0, z, q, q * num_users),
        "noise": noise,
        "num_users": num_users,
        "is_constant": False,
        "num_released": 1000,
        "num_noised": 1000,
    }
    return UserPlan(**{**given, **changes})


def charged(plan, rounds=None):
    ledger = plan.build_ledger()
    for number in range(1, (rounds or plan.rounds) + 1):
        plan.charge_round(ledger, number)
    return ledger


def cohorts(plan, client_ids, rounds, key=KEY):
    return [plan.cohort(number, client_ids, key.cohort_generator) for number in range(1, rounds + 1)]


def inclusions(plan, num_users, rounds):
    """Who took part when: bool `[rounds, users]`."""
    found = np.zeros([rounds, num_users], bool)
    for row, cohort in zip(found, cohorts(plan, range(num_users), rounds), strict=True):
        row[cohort] = True
    return found


# --- noise for a budget


def ideal_noise(epsilon, delta, rounds):
    """Of sums that everyone is in, by the exact formula for Gaussians."""

    def gap(z):
        shift = math.sqrt(rounds) / z
        above, below = (special.ndtr(half - epsilon / shift) for half in (shift / 2, -shift / 2))
        return above - math.exp(epsilon) * below - delta

    return optimize.brentq(gap, 0.1, 1e4, xtol=1e-9)


def noise_on_grid(epsilon, delta, rounds, num_released):
    """The same, where noise is drawn on a grid: of what the distance of the laws leaves of epsilon and delta."""
    rough = tree_epsilon(ideal_noise(epsilon, delta, rounds), rounds, delta / 2)
    share = 2.0**-10 * delta
    # Twice the rounds, each with pairs for all values that are released, and one for a count.
    distance = grid_distance(2 * (num_released + 3) * rounds, rough + 1 + math.log(4.04 / share))
    return ideal_noise(epsilon - 2 * distance, (delta - share) * math.exp(-distance), rounds)


def test_the_one_budget_is_public():
    assert plan_of().budget_exposure(has_releases=True) == plan_of().budget_exposure(has_releases=False) == "public"


@pytest.mark.parametrize(
    ("rounds", "noise_multipliers"),
    [(50, ("49.72", "26.38", "14.10")), (100, ("70.32", "37.31", "19.94")), (400, ("140.6", "74.61", "39.88"))],
)
def test_the_noise_of_full_participation(rounds, noise_multipliers):
    for epsilon, expected in zip((0.5, 1.0, 2.0), noise_multipliers, strict=True):
        plan = build(training(num_users=20, rounds=rounds), budgets=budget(epsilon), users_per_round=20)
        # The figures are of ideal noise. That the distance costs, and less than a thousandth of epsilon.
        ideal = ideal_noise(epsilon, 1e-5, rounds)
        assert ideal == as_printed(expected)
        wanted = noise_on_grid(epsilon, 1e-5, rounds, 1000)
        assert ideal < wanted < 1.001 * ideal
        assert plan.mechanism.noise_multiplier == pytest.approx(wanted, rel=CALIBRATED)
        assert plan.drawn_noise == {USERS: GridNoiseDpEvent(2 * 1003 * rounds)}


@pytest.mark.parametrize(
    ("q", "z", "rounds", "rdp", "pld"),
    [
        (0.05, 5, 1000, "1.340", "1.227"),
        (0.05, 10, 1000, "0.621", "0.568"),
        (0.1, 5, 100, "0.835", "0.758"),
        (0.1, 5, 1000, "2.880", "2.651"),
        (0.1, 5, 2000, "4.244", "3.921"),
        (0.1, 10, 1000, "1.320", "1.210"),
        (0.2, 5, 1000, "6.339", "5.872"),
        (0.2, 5, 2000, "9.533", "8.866"),
        (0.2, 10, 1000, "2.836", "2.614"),
    ],
)
def test_the_ledgers_epsilon_after_all_rounds(q, z, rounds, rdp, pld):
    ledger = charged(plan_of(q, float(z), rounds))
    assert [(entry.scope, entry.count) for entry in ledger.entries] == [(USERS, rounds)]
    spent = ledger.epsilon(USERS)
    assert spent.rdp == as_printed(rdp)
    # The figures are of a grid of 1e-3, the coarser of two: privacy losses are rounded up to it.
    on_grid = epsilon_bounds(poisson_gaussian_event(q, float(z), rounds), 1e-5, discretisation=1e-3).pld
    assert spent.pld <= on_grid == as_printed(pld)
    assert spent.best == epsilon_bounds(poisson_gaussian_event(q, float(z), rounds), 1e-5).best


@pytest.mark.parametrize("noise", [{"kind": "fixed_clip"}, {"kind": "adaptive_clip", "count_stddev": 0.4}, TREE])
@pytest.mark.parametrize("epsilon", [0.7, 3.0])
def test_the_planned_rounds_spend_the_budget_and_no_more(noise, epsilon):
    plan = build(user_noise=noise, budgets=budget(epsilon))
    assert float(np.float32(plan.mechanism.noise_multiplier)) == plan.mechanism.noise_multiplier
    ledger = charged(plan)
    assert 0.999 * epsilon < ledger.epsilon(USERS).best <= epsilon
    before = ledger.to_json()
    with pytest.raises(BudgetError, match="Round 101 would overspend: the plan, and its noise, are for 100 rounds"):
        plan.charge_round(ledger, 101)
    with pytest.raises(BudgetError, match="Round 0"):
        plan.charge_round(ledger, 0)
    # What has been charged once may not be charged a second time either.
    with pytest.raises(BudgetError, match="'all users' would overspend"):
        plan.charge_round(ledger, 1)
    assert ledger.to_json() == before
    # A hair less noise would not do.
    mechanism = dataclasses.replace(plan.mechanism, noise_multiplier=0.999 * plan.mechanism.noise_multiplier)
    with pytest.raises(BudgetError):
        charged(dataclasses.replace(plan, mechanism=mechanism))


@pytest.mark.parametrize("noise", [{"kind": "fixed_clip"}, TREE])
def test_a_resumed_ledger_goes_on_where_it_was(noise):
    plan = build(user_noise=noise)
    ledger = Ledger.from_json(charged(plan, 37).to_json())
    plan.precheck_rest(ledger)
    for number in range(38, 101):
        plan.charge_round(ledger, number)
    assert ledger.epsilon(USERS) == charged(plan).epsilon(USERS)


def tree_epsilon(z, nodes, delta=1e-5):
    """Of so many Gaussian releases that one user is in, worked out from their Renyi divergence by hand."""
    orders = 1 + np.geomspace(1e-2, 1e3, 20_000)
    bounds = orders * nodes / (2 * z**2) + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    return bounds.min()


@pytest.mark.parametrize(
    ("users_per_round", "rounds", "nodes"),
    # Rounds of each tree, and the nodes that its first user is in.
    [(20, 100, 10 * 4), (20, 7, 3), (20, 25, 4 + 4 + 3), (200, 30, 30), (33, 14, 3 + 3)],
)
def test_a_trees_noise_is_that_of_its_nodes(users_per_round, rounds, nodes):
    plan = build(training(rounds=rounds), user_noise=TREE, users_per_round=users_per_round)
    z = plan.mechanism.noise_multiplier
    # The library's orders are whole numbers above 11, where they miss the best one by up to a half.
    coarse = (0.5 / 11) ** 2
    assert tree_epsilon(z, nodes) == pytest.approx(1.0, rel=coarse)
    assert charged(plan).epsilon(USERS).best == pytest.approx(tree_epsilon(z, nodes), rel=coarse)


def test_a_tree_is_charged_whole_before_its_first_round():
    plan = plan_of(0.3, noise=TreeNoise(), rounds=10)
    charges = [plan.charges(USERS, number) for number in range(1, 11)]
    events = [[event for event, _, _ in charge] for charge in charges]
    whole, rest = (dp_event.SingleEpochTreeAggregationDpEvent(5.0, steps) for steps in (4, 2))
    assert events == [[whole], [], [], [], [whole], [], [], [], [rest], []]


@pytest.mark.parametrize("noise", [FixedClip(), AdaptiveClip(), TreeNoise()])
@pytest.mark.parametrize("rounds", [1, 7, 10, 23])
def test_all_rounds_charges_are_what_was_planned(noise, rounds):
    plan = plan_of(0.1, noise=noise, rounds=rounds)
    total: Counter = Counter()
    for number in range(1, rounds + 1):
        total.update({event: count for event, count, _ in plan.charges(USERS, number)})
    assert total == plan.training_counts(USERS) == plan.planned_counts(USERS)
    entered = {entry.event: entry.count for entry in charged(plan).entries}
    assert entered == total
    assert charged(plan).adjacency == plan.adjacency


def test_trees_and_sums_are_accounted_under_adjacencies_of_their_own():
    assert build(user_noise=TREE).adjacency == Adjacency.REPLACE_SPECIAL
    assert build().adjacency == build(user_noise={"kind": "adaptive_clip", "count_stddev": 0.4}).adjacency
    assert build().adjacency == Adjacency.ADD_OR_REMOVE_ONE
    assert build().unit == "user"
    assert build().scope_of("user 7") == USERS


def event_parts(event):
    return [event] if isinstance(event, dp_accounting.GaussianDpEvent) else event.events


@pytest.mark.parametrize("noise", [{"kind": "fixed_clip"}, {"kind": "adaptive_clip", "count_stddev": 0.4}])
@pytest.mark.parametrize("users_per_round", [20.0, 200.0])
@pytest.mark.parametrize("clip_norm", [0.1, 0.5, 1.7e-5])
def test_what_a_sum_releases_is_what_is_charged(noise, users_per_round, clip_norm):
    plan = build(user_noise=noise, users_per_round=users_per_round, clip_norm=clip_norm)
    query = plan.build_query(KEY.server_seeds())
    state = query.initial_global_state()
    event = query.get_noised_result(query.initial_sample_state(tf.zeros([1000])), state)[2]
    precision = sum(float(part.noise_multiplier) ** -2 for part in event_parts(event))
    ((accounted, count, _),) = plan.charges(USERS, 1)
    if users_per_round < 200:
        assert accounted.sampling_probability == plan.mechanism.sampling_rate == 0.1
        accounted = accounted.event
    assert count == 1
    assert accounted == dp_accounting.GaussianDpEvent(plan.mechanism.noise_multiplier)
    # Within half of the margin that the clip leaves for float32, which is eight roundings.
    assert precision**-0.5 == pytest.approx(plan.mechanism.noise_multiplier, rel=2.0**-21)
    clip = state.sum_state.l2_norm_clip if "count_stddev" in noise else state.l2_norm_clip
    assert float(clip) == np.float32(clip_norm)


def test_what_a_tree_releases_is_what_is_charged():
    plan = build(user_noise=TREE)
    state = plan.build_query(KEY.server_seeds()).initial_global_state()
    assert float(state.l2_norm_clip) == 0.5
    ((accounted, _, _),) = plan.charges(USERS, 1)
    assert float(state.stddev) / 0.5 == pytest.approx(accounted.noise_multiplier, rel=gamma(1))
    assert accounted.step_counts == 10
    assert tuple(state.before.shape) == (plan.num_released,)


# --- cohorts


def test_everyone_is_drawn_equally_often_and_independently_of_everyone_else():
    q, num_users, rounds = 0.3, 200, 3000
    found = inclusions(plan_of(q, num_users=num_users), num_users, rounds)
    counts = found.sum(axis=0)
    statistic = ((counts - rounds * q) ** 2).sum() / (rounds * q * (1 - q))
    low, high = stats.chi2(num_users).ppf([1e-3, 1 - 1e-3])
    assert low < statistic < high
    # No two users together more often, or more rarely, than chance has it.
    correlations = np.corrcoef(found.T)[np.triu_indices(num_users, 1)]
    assert np.abs(correlations).max() < 5.5 / math.sqrt(rounds)
    assert abs(correlations.mean()) < 4 / math.sqrt(rounds * len(correlations))
    # Nor one user in rounds that follow each other.
    assert abs(np.corrcoef(found[1:].ravel(), found[:-1].ravel())[0, 1]) < 4 / math.sqrt(found.size)


@pytest.mark.parametrize(("q", "num_users"), [(0.3, 40), (0.02, 100), (0.5, 7)])
def test_sizes_of_cohorts_are_binomial(q, num_users):
    rounds = 4000
    sizes = np.array([len(cohort) for cohort in cohorts(plan_of(q), range(num_users), rounds)])
    expected = stats.binom(num_users, q)
    assert abs(sizes.mean() - expected.mean()) < 3.5 * expected.std() / math.sqrt(rounds)
    fourth = expected.expect(lambda size: (size - expected.mean()) ** 4)
    assert abs(sizes.var() - expected.var()) < 3.5 * math.sqrt((fourth - expected.var() ** 2) / rounds)
    frequent = [size for size in range(num_users + 1) if rounds * expected.pmf(size) >= 5]
    observed = np.array([(sizes == size).sum() for size in frequent])
    wanted = rounds * expected.pmf(frequent)
    assert ((observed - wanted) ** 2 / wanted).sum() < stats.chi2(len(frequent)).ppf(1 - 1e-3)
    # Nobody at all is a cohort like any other.
    assert (sizes == 0).any() == (rounds * expected.pmf(0) > 1)


@pytest.mark.parametrize(("q", "rounds"), [(0.1, 40), (0.0005, 4000)])
def test_cohorts_of_large_populations_are_uniform_too(q, rounds):
    """NumPy takes other ways for more than ten thousand, and others again where few are drawn."""
    num_users, parts = 20_000, 40
    drawn = np.concatenate(cohorts(plan_of(q), range(num_users), rounds))
    counts = np.bincount(drawn * parts // num_users, minlength=parts)
    mean = rounds * q * num_users / parts
    statistic = ((counts - mean) ** 2).sum() / (mean * (1 - q))
    low, high = stats.chi2(parts).ppf([1e-3, 1 - 1e-3])
    assert low < statistic < high


@pytest.mark.parametrize("noise", [FixedClip(), TreeNoise()])
def test_a_cohort_is_of_different_places_in_order_and_the_same_for_the_same_key(noise):
    plan, ids = plan_of(0.3, noise=noise), [str(place) for place in range(50)]
    for cohort in cohorts(plan, ids, 20):
        assert cohort.dtype == np.int64
        assert (np.diff(cohort) > 0).all()
        assert all(0 <= place < 50 for place in cohort)
    for mine, again in zip(cohorts(plan, ids, 20), cohorts(plan, ids, 20), strict=True):
        np.testing.assert_array_equal(mine, again)
    others = cohorts(plan, ids, 20, RunKey.from_test_seed(4))
    assert any(not np.array_equal(mine, other) for mine, other in zip(cohorts(plan, ids, 20), others, strict=True))


def test_full_participation_is_everyone_in_every_round():
    for cohort in cohorts(plan_of(1.0), range(30), 5):
        np.testing.assert_array_equal(cohort, np.arange(30))


def test_drawing_from_a_population_takes_no_more_than_the_cohort():
    plan = plan_of(1e-10)
    tracemalloc.start()
    started = time.monotonic()
    for number in range(1, 21):
        cohort = plan.cohort(number, range(10**12), KEY.cohort_generator)
        assert 40 < len(cohort) < 180
        assert cohort.min() >= 0 and 10**9 < cohort.max() < 10**12
    assert time.monotonic() - started < 2
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("num_users", "q", "length"),
    [(10, 0.3, 4), (12, 0.25, 4), (100, 0.07, 15), (5, 0.25, 4), (3, 0.25, 4), (7, 1.0, 1)],
)
def test_a_tree_has_every_user_exactly_once(num_users, q, length):
    drawn = cohorts(plan_of(q, noise=TreeNoise()), range(num_users), 3 * length)
    epochs = [drawn[start : start + length] for start in range(0, 3 * length, length)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(num_users))
        assert max(len(cohort) for cohort in epoch) <= math.ceil(num_users / length)
    if num_users > 7:
        assert not all(np.array_equal(one, other) for one, other in zip(*epochs[:2], strict=True))


def test_a_last_tree_that_is_cut_short_has_nobody_twice():
    drawn = cohorts(plan_of(0.1, noise=TreeNoise(), rounds=15), range(95), 15)
    assert len(np.unique(np.concatenate(drawn[10:]))) == sum(len(cohort) for cohort in drawn[10:]) == 50


@pytest.mark.parametrize("noise", [FixedClip(), AdaptiveClip(), TreeNoise()])
def test_who_releases_nothing_is_charged_nothing_and_takes_part(noise):
    given = {FixedClip: "fixed_clip", AdaptiveClip: "adaptive_clip", TreeNoise: "tree"}[type(noise)]
    plan = build(training(num_released=0), user_noise={"kind": given}, num_users=300)
    assert plan.mechanism.noise_multiplier == 0
    for number in (1, 2, 100):
        np.testing.assert_array_equal(plan.cohort(number, range(200), KEY.cohort_generator), np.arange(200))
        assert plan.charges(USERS, number) == []
    ledger = charged(plan)
    assert ledger.entries == ()
    assert ledger.epsilon(USERS).best == 0
    assert plan.training_counts(USERS) == Counter()
    assert (plan.noise_to_signal, plan.warning) == (0.0, "")


# --- noise to signal


def test_noise_that_leaves_nothing_to_learn_is_warned_of_with_how_many_users_it_takes():
    plan = build(training(num_users=20, num_released=270_000), users_per_round=20)
    # With ideal noise 37.31.
    z = noise_on_grid(1.0, 1e-5, 100, 270_000)
    assert plan.mechanism.noise_multiplier == pytest.approx(z, rel=CALIBRATED) == as_printed("37.32", CALIBRATED)
    assert plan.noise_to_signal == as_printed("9.70e2")
    assert "about 970 times as long" in plan.warning
    assert "z = 37.3, d = 270,000 values, qN = 20 users" in plan.warning
    # 20 users at 970 to 1 are 1,940 at 10 to 1.
    users = math.ceil(20 * plan.noise_to_signal / 10)
    assert 1939 <= users <= 1941
    assert f"some {users:,} users" in plan.warning
    # Of others in one cohort the noise is the same.
    enough = training(num_users=users, num_released=270_000)
    assert build(enough, users_per_round=users).warning == ""
    fewer = training(num_users=users - 5, num_released=270_000)
    assert build(fewer, users_per_round=users - 5).warning != ""


def test_what_noise_changes_nothing_of_does_not_count():
    plan = build(training(num_released=270_000, num_noised=1000))
    assert plan.num_released == 270_000
    assert plan.noise_to_signal == pytest.approx(plan.mechanism.noise_multiplier * math.sqrt(1000) / 20)


def test_noise_that_pays_for_a_count_counts():
    noise = {"kind": "adaptive_clip", "count_stddev": 0.2}
    plan, fixed = build(user_noise=noise), build()
    z = fixed.mechanism.noise_multiplier
    assert plan.mechanism.noise_multiplier == z
    assert plan.noise_to_signal == pytest.approx((z**-2 - 8**-2) ** -0.5 * math.sqrt(1000) / 20)
    assert plan.noise_to_signal > fixed.noise_to_signal == pytest.approx(z * math.sqrt(1000) / 20)


def test_shares_of_the_noise_of_an_expected_cohort_add_up_to_that_of_a_sum():
    plan = build(training(noise_on_own_support=True))
    share = plan.noise_share
    assert math.sqrt(20 * share**2) == pytest.approx(plan.mechanism.noise_multiplier * 0.5)
    # The server adds none then, and clips nothing that noise has made longer.
    state = plan.build_query(KEY.server_seeds()).initial_global_state()
    assert (float(state.l2_norm_clip), float(state.stddev)) == (math.inf, 0.0)
    assert read_unprotected().build(training(noise_on_own_support=True)).noise_share == 0.0


# --- claims


def test_what_is_claimed():
    formal = build(num_users=200, generator="chacha20")
    assert formal.claim == "formal"
    assert "divided by a public constant" in formal.claim_reason
    conditional = build(generator="chacha20")
    assert (conditional.claim, conditional.claim_reason) == (
        "formal-conditional",
        "the number of users is treated as public",
    )
    philox = build(num_users=200)
    assert (philox.claim, philox.claim_reason) == (
        "formal-conditional",
        "random bits are Philox's, which is no cryptographic generator",
    )
    assert build().claim_reason == f"{conditional.claim_reason}; {philox.claim_reason}"
    method = build(training(condition="the server is trusted"), num_users=200, generator="chacha20")
    assert (method.claim, method.claim_reason) == ("formal-conditional", "the server is trusted")
    both = build(training(condition="the server is trusted"), generator="chacha20")
    assert both.claim == "formal-conditional"
    assert both.claim_reason == "the server is trusted; the number of users is treated as public"
    unsound = build(training(unsound="masks tell", condition="the server is trusted"), num_users=200)
    assert (unsound.claim, unsound.claim_reason) == ("none", "masks tell")
    with pytest.raises(ConfigError, match=r"privacy\.generator must be one of chacha20, philox, not 'aes'"):
        build(generator="aes")


def test_a_public_number_of_users_sets_rate_and_divisor():
    plan = build(num_users=400)
    assert (plan.mechanism.sampling_rate, plan.mechanism.expected_cohort) == (0.05, 20.0)
    assert build().mechanism.sampling_rate == 0.1
    # One user more or less in the data changes nothing of the mechanism.
    assert build(training(num_users=201), num_users=400).mechanism == plan.mechanism
    sizes = [len(cohort) for cohort in cohorts(plan, range(200), 500)]
    assert abs(np.mean(sizes) - 10) < 4 * math.sqrt(200 * 0.05 * 0.95 / 500)


def test_weights_change_the_divisor_alone():
    weighted, plain = build(training(total_weight=50.0)), build()
    assert weighted.mechanism == dataclasses.replace(plain.mechanism, expected_cohort=0.1 * 50.0)


# --- no privacy, and errors


@pytest.mark.parametrize("noise", ["fixed_clip", "adaptive_clip", "tree"])
def test_without_privacy_the_same_cohorts_train_without_clip_and_noise(noise):
    plan = without_privacy(read(user_noise={"kind": noise})).build(training())
    assert isinstance(plan, UserPlan)
    assert plan.claim == "none"
    assert plan.build_ledger() is None
    assert (plan.mechanism.clip_norm, plan.mechanism.noise_multiplier) == (math.inf, 0.0)
    private = plan_of(0.1, noise={"tree": TreeNoise()}.get(noise))
    for mine, its in zip(cohorts(plan, range(200), 12), cohorts(private, range(200), 12), strict=True):
        np.testing.assert_array_equal(mine, its)
    # The sum is a plain one, round after round.
    query = plan.build_query(KEY.server_seeds())
    state = query.initial_global_state()
    for _ in range(3):
        params = query.derive_sample_params(state)
        sample = query.initial_sample_state(tf.zeros([1000]))
        for value in (1e10, 2e10):
            sample = query.accumulate_record(params, sample, tf.fill([1000], value))
        total, state, _ = query.get_noised_result(sample, state)
        # Of a tree, the difference of running sums of up to three rounds.
        np.testing.assert_allclose(total, 3e10, rtol=3 * gamma(2 * 3 + 2))


PAPER = {"noise_on_own_support": True}


@pytest.mark.parametrize("reader", [read, read_unprotected])
@pytest.mark.parametrize(
    ("changes", "planned", "message"),
    [
        ({"users_per_round": None}, {}, r"users_per_round (must be a number above 0, not None|is required with unit)"),
        ({"users_per_round": 0.0}, {}, r"privacy\.users_per_round must be a number above 0.*, not 0\.0"),
        ({"users_per_round": -1.0}, {}, r"privacy\.users_per_round must be a number above 0.*, not -1\.0"),
        ({"users_per_round": math.nan}, {}, r"privacy\.users_per_round must be a number above 0.*, not nan"),
        ({"users_per_round": 200.5}, {}, r"users_per_round must be at most 200, the number of users, not 200\.5"),
        ({"users_per_round": 150.0, "num_users": 100}, {}, r"at most 100"),
        ({"num_users": 0}, {}, r"privacy\.num_users must be a whole number of at least 1.*, not 0"),
        ({"num_users": -3}, {}, r"privacy\.num_users must be a whole number of at least 1.*, not -3"),
        ({"user_noise": {"kind": "laplace"}}, {}, r"privacy\.user_noise\.kind must be one of .*, not 'laplace'"),
        ({"user_noise": TREE}, PAPER, r"use kind fixed_clip"),
        ({"user_noise": TREE}, {"total_weight": 50.0}, r"use kind fixed_clip"),
        ({"user_noise": {"kind": "adaptive_clip"}}, {"total_weight": 50.0}, r"use kind fixed_clip"),
        ({}, {"search": Search(({},), 1, 5.0, 1.0, False)}, r"tuning\.search is for privacy\.kind silo_example"),
        ({}, {"fixed_events": {"user 1": ((dp_accounting.NoOpDpEvent(), "mean"),)}}, r"may release nothing of single"),
        ({"noise_multiplier": 3.0}, {}, r"unknown key privacy\.noise_multiplier"),
        ({"noise_calibration": "paper_rdp"}, {}, r"unknown key privacy\.noise_calibration"),
        ({"selection_share": 0.5}, {}, r"unknown key privacy\.selection_share"),
        (
            {"num_examples": {"kind": "noised", "epsilon": 1.0}},
            {},
            r"key privacy\.num_examples|num_examples is for silos",
        ),
        ({"sampler": "paper_shuffled"}, {}, r"unknown key privacy\.sampler|privacy: sampler is for silos"),
        ({"selection_loss_bound": 0.5}, {}, r"key privacy\.selection_loss_bound|selection_loss_bound is for silos"),
    ],
)
def test_what_does_not_fit_users_is_refused(reader, changes, planned, message):
    with pytest.raises(ConfigError, match=message):
        reader(**changes).build(training(**planned))


def test_users_release_no_moments_of_their_features():
    moments = {"kind": "dp_moments", "lower": 0.0, "upper": 1.0, "noise_multiplier": 2.0}
    with pytest.raises(ConfigError, match=r"privacy\.feature_scaling\.kind must be one of .*, not 'dp_moments'"):
        read(feature_scaling=moments)
    with pytest.raises(ConfigError, match="feature_scaling may release nothing of single users"):
        read_unprotected(feature_scaling=moments)


CLIP = r"privacy\.clip_norm must be a number of at least 1e-20 and at most 1e\+20, not"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": budget(math.inf)}, r"privacy: budgets\.epsilon is infinite"),
        ({"budgets": budget(1.0, 0.005)}, r"delta 0.005 is not below 1 / 200"),
        ({"budgets": budget(1.0, 0.002), "num_users": 500}, r"delta 0.002 is not below 1 / 500"),
        ({"budgets": {"kind": "one_for_all", "epsilon": 1.0}}, r"missing key privacy\.budgets\.delta"),
        (
            {"budgets": {"kind": "by_silo", "delta": 1e-5, "silos": {"user 1": 1.0}}},
            r"privacy\.budgets\.kind must be one_for_all, not 'by_silo'",
        ),
        ({"clip_norm": 0.0}, CLIP),
        ({"clip_norm": -1.0}, CLIP),
        ({"clip_norm": math.inf}, CLIP),
        ({"clip_norm": math.nan}, CLIP),
        # As float32 this would be infinite, and clip nothing.
        ({"clip_norm": 1e39}, CLIP),
        ({"clip_norm": 1e-46}, CLIP),
    ],
)
def test_budgets_and_clips_that_promise_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_a_budget_that_no_noise_meets_is_refused():
    with pytest.raises(BudgetError, match="No noise multiplier up to"):
        build(training(rounds=10_000), budgets=budget(1e-4, 1e-12), users_per_round=200.0)
    with pytest.raises(BudgetError, match="No noise multiplier up to"):
        build(training(rounds=10_000), budgets=budget(1e-4, 1e-12), user_noise=TREE)


def test_a_count_with_too_little_noise_is_refused_before_training():
    with pytest.raises(BudgetError, match=r"privacy\.user_noise\.count_stddev 0\.01 times 20 users"):
        build(user_noise={"kind": "adaptive_clip", "count_stddev": 0.01})


def test_a_count_with_so_much_noise_that_its_halves_lie_between_steps_is_refused():
    most = {"kind": "adaptive_clip", "count_stddev": 4999.0}
    assert build(user_noise=most).mechanism.noise_multiplier > 0
    with pytest.raises(BudgetError, match=r"count_stddev 5001 times 20 users is too much noise .* at most 5e\+03$"):
        build(user_noise={**most, "count_stddev": 5001.0})


@pytest.mark.parametrize("noise", [{"kind": "fixed_clip"}, {"kind": "adaptive_clip", "count_stddev": 0.4}, TREE])
def test_the_distance_of_drawn_noise_is_charged_once_for_all_rounds(noise):
    plan = build(user_noise=noise)
    nodes = 2 if noise == TREE else 1
    event = GridNoiseDpEvent(2 * (nodes * 1001 + 2) * 100)
    ledger = charged(plan)
    drawn = [(entry.scope, entry.event, entry.count) for entry in ledger.entries if entry.reason == DRAWN_NOISE]
    assert drawn == [(USERS, event, 1)]
    # Before any noise is drawn.
    assert ledger.entries[0].event == event
    # Also where a ledger was begun without.
    later = Ledger(plan.unit, plan.adjacency, plan.budgets)
    plan.charge_round(later, 1)
    plan.charge_round(later, 2)
    assert [entry.event for entry in later.entries].count(event) == 1
    paper = build(training(noise_on_own_support=True))
    assert paper.drawn_noise == {}
