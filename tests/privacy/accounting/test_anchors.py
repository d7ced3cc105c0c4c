"""Published and separately computed figures that the accountants have to reproduce.

Figures under "rdp" and "pld" come from dp_accounting's own grids: default orders, and privacy losses in steps of 1e-3.
"""

import math

import attr
import dp_accounting
import numpy as np
import pytest
from scipy import special, stats

from tests.privacy.accounting.anchor_support import CALIBRATED, by_coarser_orders, by_noise
from tests.rounding import as_printed, half_a_digit
from tff_pdp.errors import BudgetError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    calibrate_noise_multiplier,
    epsilon_bounds,
    exact_gaussian_epsilon,
)
from tff_pdp.privacy.accounting.events import (
    CustomDpEvent,
    ExponentialMechanismDpEvent,
    RdpAccountant,
    poisson_gaussian_event,
)

GRID = 1e-3


def assert_smallest(noise, epsilon, delta, rate, steps):
    """Checks that a calibrated noise is within its budget, and that less by its tolerance is not."""
    enough, less = (
        epsilon_bounds(poisson_gaussian_event(rate, multiplier, steps), delta).best
        for multiplier in (noise, noise * (1 - CALIBRATED))
    )
    assert enough <= epsilon < less


@pytest.mark.parametrize(
    "records, batch, noise, steps, delta, rdp, pld",
    [
        (60000, 256, 1.1, 14100, 1e-5, "2.600", "2.394"),
        (1000, 32, 1.0, 1000, 1e-5, "7.239", "6.589"),
        (872, 64, 4.0, 5213, 1e-7, "7.992", "7.546"),
        (1500, 100, 2.0, 3015, 1e-4, "9.466", "8.675"),
    ],
)
def test_dp_sgd_in_a_silo(records, batch, noise, steps, delta, rdp, pld):
    event = poisson_gaussian_event(batch / records, noise, steps)
    on_grid = epsilon_bounds(event, delta, discretisation=GRID)
    assert on_grid.rdp == as_printed(rdp)
    assert on_grid.pld == as_printed(pld)
    # By a grid that is no coarser, where epsilon is below ten.
    assert epsilon_bounds(event, delta).best <= on_grid.best + GRID


@pytest.mark.parametrize(
    "rate, noise, steps, rdp, pld",
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
def test_user_level(rate, noise, steps, rdp, pld):
    bounds = epsilon_bounds(poisson_gaussian_event(rate, noise, steps), 1e-5, discretisation=GRID)
    assert bounds.rdp == as_printed(rdp)
    assert bounds.pld == as_printed(pld)
    assert bounds.best == min(bounds.rdp, bounds.pld)


@pytest.mark.parametrize(
    "epsilon, rate, noise, steps",
    [(4, 0.1, 5, 1801), (10, 0.1, 5, 8692), (1.25, 0.05, 5, 878), (3, 0.05, 5, 4348), (1.25, 0.05, 10, 3639)],
)
def test_steps_within_a_user_level_budget(epsilon, rate, noise, steps):
    bounds = epsilon_bounds(poisson_gaussian_event(rate, noise, steps), 1e-5, discretisation=GRID)
    # The last step that fits, and epsilon grows by less than a step's share of it.
    assert epsilon * (1 - 1 / steps) < bounds.rdp <= epsilon


@pytest.mark.parametrize(
    "epsilon, delta, rate, steps, rdp_noise, pld_noise",
    [
        (0.5, 1e-7, 64 / 872, 5200, "50.84", "49.40"),
        (0.5, 1e-7, 64 / 1933, 12000, "34.84", "35.66"),
        (6.0, 1e-3, 1.0, 200, "9.221", "8.462"),
        (6.0, 1e-3, 32 / 175, 1000, "3.857", "3.542"),
    ],
)
def test_calibration(epsilon, delta, rate, steps, rdp_noise, pld_noise):
    """Each published multiplier meets the budget under its own accountant; ours needs no more than the smaller."""
    at_rdp, at_pld = (
        epsilon_bounds(poisson_gaussian_event(rate, float(noise), steps), delta, discretisation=GRID)
        for noise in (rdp_noise, pld_noise)
    )
    assert at_rdp.rdp == pytest.approx(epsilon, rel=by_noise(rdp_noise))
    assert at_pld.pld == pytest.approx(epsilon, rel=by_noise(pld_noise))
    found, published = calibrate_noise_multiplier(epsilon, delta, rate, steps), min(float(rdp_noise), float(pld_noise))
    assert found <= published * (1 + CALIBRATED) + half_a_digit(rdp_noise)
    assert_smallest(found, epsilon, delta, rate, steps)
    # The finer grid gains up to some 7 % where tiny losses are composed very often, and nothing beyond that.
    assert found >= 0.93 * published


@pytest.mark.parametrize(
    "epsilon, delta, rate, steps, rdp_noise",
    [
        pytest.param(1.0, 1e-5, 0.01, 1000, "1.5131", marks=pytest.mark.all),
        (1.5, 1e-4, 64 / 699, 200 * (699 // 64), "10.06"),
        (1.5, 1e-4, 64 / 776, 200 * (776 // 64), "9.93"),
    ],
)
def test_calibration_by_rdp(epsilon, delta, rate, steps, rdp_noise):
    noise = float(rdp_noise)
    found = epsilon_bounds(poisson_gaussian_event(rate, noise, steps), delta).rdp
    assert found == pytest.approx(epsilon, rel=by_noise(rdp_noise))
    calibrated = calibrate_noise_multiplier(epsilon, delta, rate, steps)
    assert 0.85 * noise < calibrated < noise
    assert_smallest(calibrated, epsilon, delta, rate, steps)


@pytest.mark.parametrize(
    "steps, noises",
    [
        (50, ("49.72", "26.38", "14.10")),
        pytest.param(100, ("70.32", "37.31", "19.94"), marks=pytest.mark.all),
        (400, ("140.6", "74.61", "39.88")),
    ],
)
def test_calibration_of_gaussians_with_everyone_in_each_step(steps, noises):
    for epsilon, noise in zip((0.5, 1.0, 2.0), noises, strict=True):
        assert calibrate_noise_multiplier(epsilon, 1e-5, 1.0, steps) == as_printed(noise, CALIBRATED)


def test_one_gaussian_by_rdp_and_by_the_classic_formula():
    by_rdp = epsilon_bounds(poisson_gaussian_event(1.0, 14.567, 1), 1e-5)
    assert by_rdp.rdp == pytest.approx(0.25, rel=by_noise("14.567"))
    classic = math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.25
    assert classic == as_printed("19.379")
    assert exact_gaussian_epsilon(classic, 1e-5) < exact_gaussian_epsilon(14.567, 1e-5) < by_rdp.rdp


def test_concentrated_dp():
    orders = (1.5, 3.0, 20.0)

    def curve(event):
        return RdpAccountant(orders).compose(event).rdp

    gaussians = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(6.0), 9)
    assert curve(gaussians) == pytest.approx(9 / (2 * 6.0**2) * np.array(orders))
    choices = dp_accounting.SelfComposedDpEvent(ExponentialMechanismDpEvent(0.2), 9)
    assert curve(choices) == pytest.approx(9 * 0.2**2 / 8 * np.array(orders))


# 1000 records, batches of 50, 2000 steps, which are 100 epochs, noise multiplier 4 for add/remove.
@pytest.mark.parametrize(
    "adjacency, event, rdp",
    [
        (Adjacency.ADD_OR_REMOVE_ONE, poisson_gaussian_event(0.05, 4.0, 2000), "2.52"),
        (
            Adjacency.REPLACE_ONE,
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(2.0)), 2000
            ),
            "13.5",
        ),
        (Adjacency.REPLACE_SPECIAL, poisson_gaussian_event(1.0, 4.0, 100), "14.1"),
        (Adjacency.REPLACE_ONE, poisson_gaussian_event(1.0, 2.0, 100), "35.1"),
    ],
    ids=["poisson", "fixed size", "shuffled, zero-out", "shuffled, replaced"],
)
def test_what_a_batch_costs_depends_on_its_sampler(adjacency, event, rdp):
    assert epsilon_bounds(event, 1e-5, adjacency, GRID).rdp == as_printed(rdp)


@pytest.mark.parametrize(
    "batch, steps, label, stated",
    [
        (4, 8000, 0.5, "0.1"),
        (4, 8000, 3.0, "6.1"),
        (4, 8000, 10.0, "3.9e2"),
        (64, 1860, 0.5, "0.08"),
        (64, 1860, 10.0, "2.5"),
        (64, 1860, 20.0, "16.9"),
    ],
)
def test_asymptotic_noise_formula_is_off_both_ways(batch, steps, label, stated):
    """What PFA's formula for the noise, used outside of the range where it holds, costs in truth."""
    noise = 10 * batch / 6000 * math.sqrt(steps * -math.log10(1e-5)) / label
    bounds = epsilon_bounds(poisson_gaussian_event(batch / 6000, noise, steps), 1e-5, discretisation=GRID)
    assert bounds.best == as_printed(stated)


def test_rdp_where_next_to_no_noise_is_added():
    noise = 10 * 4 / 6000 * math.sqrt(8000 * 5) / 10.0
    found = epsilon_bounds(poisson_gaussian_event(4 / 6000, noise, 8000), 1e-5).rdp
    assert by_coarser_orders("438") <= found <= 438 + half_a_digit("438")


# 1000 records, batches of 64, 400 rounds of 15 steps, epsilon 0.5 at delta 1e-7.
EPOCH_STEPS, ROUNDS = 1000 // 64, 400


@pytest.mark.parametrize("passes, rdp_noise", [(1, "47.62"), (2, "67.32")])
def test_ditto_doubles_the_steps(passes, rdp_noise):
    steps = passes * EPOCH_STEPS * ROUNDS
    noise = float(rdp_noise)
    found = epsilon_bounds(poisson_gaussian_event(0.064, noise, steps), 1e-7).rdp
    assert found == pytest.approx(0.5, rel=by_noise(rdp_noise))
    calibrated = calibrate_noise_multiplier(0.5, 1e-7, 0.064, steps)
    assert 0.9 * noise < calibrated < noise * (1 + CALIBRATED)
    assert_smallest(calibrated, 0.5, 1e-7, 0.064, steps)


def test_ifca_pays_for_its_selections():
    choice = ExponentialMechanismDpEvent(0.03 * 0.5)
    few, many = (dp_accounting.SelfComposedDpEvent(choice, count) for count in (ROUNDS // 10, ROUNDS))
    noise = calibrate_noise_multiplier(0.5, 1e-7, 0.064, EPOCH_STEPS * ROUNDS, [few])
    assert noise == as_printed("53.48", CALIBRATED)
    assert epsilon_bounds(many, 1e-7).rdp == as_printed("0.734")
    with pytest.raises(BudgetError, match="private selection"):
        calibrate_noise_multiplier(0.5, 1e-7, 0.064, EPOCH_STEPS * ROUNDS, [many])


CHOICES = (1, 20, 40, 400)
CHOICES_ALONE = [
    (0.5, ("0.029", "0.141", "0.204", "0.687")),
    (1.0, ("0.060", "0.293", "0.423", "1.436")),
    (2.0, ("0.126", "0.610", "0.881", "3.038")),
]


@pytest.mark.parametrize("epsilon, stated", CHOICES_ALONE)
def test_selections_alone(epsilon, stated):
    """The stated figures are those of Gaussians with equal concentrated DP; the bound for choices is another one."""
    choice_epsilon, delta = 0.03 * epsilon, 1e-7
    for count, gaussian in zip(CHOICES, stated, strict=True):
        found = exact_gaussian_epsilon(2 / choice_epsilon / math.sqrt(count), delta)
        # Some were rounded to four digits first.
        assert found == pytest.approx(float(gaussian), abs=half_a_digit(gaussian) + half_a_digit(gaussian + "0"))
        bounds = epsilon_bounds(
            dp_accounting.SelfComposedDpEvent(ExponentialMechanismDpEvent(choice_epsilon), count), delta
        )
        assert 1.0 <= bounds.best / exact_epsilon_of_choices(choice_epsilon, count, delta) < 1.12
        if count == 1:
            # Up to the next cell of a grid that is no finer than 1e-5.
            assert choice_epsilon <= bounds.best <= choice_epsilon + 1e-5
        else:
            assert float(gaussian) < bounds.best == bounds.rdp


def exact_epsilon_of_choices(choice_epsilon, count, delta):
    """Of `count` choices between two outcomes, worst case over how far the scores' difference moved which way.

    A choice by the exponential mechanism has privacy losses within a range of epsilon (Dong, Durfee and Rogers,
    "Optimal differential privacy composition for exponential mechanisms", 2020): t for one outcome, t - epsilon for the
    other. The number of outcomes of the first kind is then binomial.
    """
    firsts, worst = np.arange(count + 1), 0.0
    for loss in np.linspace(0, choice_epsilon, 41)[1:-1]:
        without = (1 - math.exp(loss - choice_epsilon)) / (math.exp(loss) - math.exp(loss - choice_epsilon))
        likely = without * math.exp(loss)
        probabilities = stats.binom.pmf(firsts, count, likely)
        losses = firsts * loss + (count - firsts) * (loss - choice_epsilon)

        def excess(epsilon, probabilities=probabilities, losses=losses):
            return (probabilities * np.maximum(-np.expm1(epsilon - losses), 0)).sum() - delta

        low, high = 0.0, count * choice_epsilon
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        worst = max(worst, low)
    return worst


@attr.s(frozen=True, slots=True, auto_attribs=True)
class NodeLevelDpEvent(CustomDpEvent):
    """A noisy sum over a batch of rows drawn without replacement, of which one node can influence `rows`.

    Source: Daigavane et al., "Node-level differentially private graph neural networks", 2021; constant 2 for
    replacement, 1/2 for what the released code of the MR-MTL thesis computes.
    """

    num_rows: int
    rows: int
    batch_size: int
    noise_multiplier: float
    constant: float

    def rdp(self, orders):
        hit = np.arange(self.rows + 1)
        log_probability = stats.hypergeom(self.num_rows, self.rows, self.batch_size).logpmf(hit)
        exponents = self.constant * (hit / self.noise_multiplier) ** 2
        return np.array([special.logsumexp(log_probability + a * (a - 1) * exponents) / (a - 1) for a in orders])


@pytest.mark.parametrize(
    "constant, rows, epochs, stated",
    [
        (0.5, 20, 1, ("6.28", "45.4", "142", "5.56")),
        (0.5, 20, 2, ("8.81", "64.2", "201", "7.78")),
        (0.5, 21, 2, ("9.03", "66.3", "208", "7.98")),
        (2, 20, 1, ("14.6", "142", "515", "12.8")),
        (2, 20, 2, ("20.7", "201", "726", "18.1")),
        (2, 21, 2, ("21.3", "208", "755", "18.6")),
    ],
)
def test_node_level(constant, rows, epochs, stated):
    people = 2_609_976
    for noise, epsilon in zip((4.5, 1.0, 0.5, 5.0), stated, strict=True):
        step = NodeLevelDpEvent(people, rows, 512, noise, constant)
        bounds = epsilon_bounds(dp_accounting.SelfComposedDpEvent(step, 5098 * epochs), 1 / people)
        assert bounds.best == bounds.rdp <= float(epsilon) + half_a_digit(epsilon)
        assert bounds.rdp >= by_coarser_orders(epsilon)


def test_node_level_curve():
    orders = np.array([1.5, 4.0, 30.0])
    whole = NodeLevelDpEvent(100, 1, 100, 3.0, 0.5).rdp(orders)
    assert whole == pytest.approx(orders / (2 * 3.0**2))
    half_noise = NodeLevelDpEvent(100, 7, 20, 1.5, 0.5).rdp(orders)
    assert NodeLevelDpEvent(100, 7, 20, 3.0, 2).rdp(orders) == pytest.approx(half_noise)


@pytest.mark.parametrize(
    "kept, noise, epsilon, by_rdp, exactly",
    [
        (200, 5000, 1.0, 1909, 2245),
        (300, 800, 10.0, 1901, 2134),
        (350, 1000, 10.0, 2546, 2858),
        (700, 9000, 1.0, 1767, 2078),
        (500, 700, 10.0, 873, 980),
    ],
)
def test_queries_of_a_vote_aggregation(kept, noise, epsilon, by_rdp, exactly):
    """DataLens: one query is a Gaussian sum of votes, of which one teacher can move 2 sqrt(kept)."""

    def bounds(queries):
        return epsilon_bounds(poisson_gaussian_event(1.0, noise / (2 * math.sqrt(kept)), queries), 1e-5)

    assert bounds(exactly).best <= epsilon < bounds(exactly + 1).best
    # The last query that fits, and epsilon grows by less than a query's share of it.
    assert epsilon * (1 - 1 / by_rdp) < bounds(by_rdp).rdp <= epsilon
