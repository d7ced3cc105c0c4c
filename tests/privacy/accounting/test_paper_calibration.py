import math

import pytest

from tests.privacy.accounting.anchor_support import CALIBRATED
from tests.rounding import as_printed, gamma
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import calibrate_noise_multiplier, epsilon_bounds, poisson_gaussian_event
from tff_pdp.privacy.accounting.calibration import asymptotic_noise_multiplier, paper_epsilon, paper_noise_multiplier
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent
from tff_pdp.privacy.plans.plan import PlannedTraining
from tff_pdp.privacy.plans.silo_example import SiloExample
from tff_pdp.settings import read_settings

# What the accountant adds to each event's divergence against cancellation, over order - 1 = 2.5 and beyond.
ROUNDED_UP = 1e-14 / 2


def test_without_sampling_it_is_the_classic_formula_at_the_best_of_the_orders():
    # RDP of T Gaussian sums is T a / (2 z^2); the best order is 1 + sqrt(2 z^2 log(1/delta) / T), and 3.5 is near it.
    z, steps, delta = 10.0, 200, 1e-3
    by_hand = min(steps * a / (2 * z**2) + math.log(1 / delta) / (a - 1) for a in (3.0, 3.5, 4.0, 4.5))
    assert paper_epsilon(z, delta, 1.0, steps) == pytest.approx(by_hand, abs=ROUNDED_UP * steps)


def test_selections_add_an_eighth_of_their_epsilon_squared_at_every_order():
    z, delta, selected, count = 10.0, 1e-3, 0.03, 20
    selections = ((ExponentialMechanismDpEvent(selected), count),)
    by_hand = min(
        100 * a / z**2 + count * selected**2 / 8 * a + math.log(1 / delta) / (a - 1) for a in (3.0, 3.5, 4.0, 4.5)
    )
    assert paper_epsilon(z, delta, 1.0, 200, selections) == pytest.approx(by_hand, abs=ROUNDED_UP * (200 + count))


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"),
    [(6.0, 1.0, 200), (6.0, 0.16, 1200), (0.5, 0.05, 400), pytest.param(20.0, 0.25, 10, marks=pytest.mark.all)],
)
def test_the_noise_spends_the_epsilon_by_the_papers_accounting_and_less_by_ours(epsilon, rate, steps):
    noise = paper_noise_multiplier(epsilon, 1e-5, rate, steps)
    assert epsilon * (1 - 1e-3) < paper_epsilon(noise, 1e-5, rate, steps) <= epsilon
    assert epsilon_bounds(poisson_gaussian_event(rate, noise, steps), 1e-5).best < epsilon
    assert noise > calibrate_noise_multiplier(epsilon, 1e-5, rate, steps)


def test_what_cannot_be_met_is_refused_and_no_privacy_needs_no_noise():
    assert paper_noise_multiplier(math.inf, 1e-5, 0.1, 100) == 0.0
    with pytest.raises(BudgetError, match="paper's accounting"):
        paper_noise_multiplier(0.1, 1e-5, 0.1, 100, [ExponentialMechanismDpEvent(5.0)])


def test_a_plan_takes_its_noise_from_the_calibration_it_names():
    def plan(**how):
        budgets = {"kind": "one_for_all", "epsilon": 6.0, "delta": 1e-3}
        content = {"kind": "silo_example", "batch_size": 32, "budgets": budgets, **how}
        settings = read_settings(SiloExample, content, "test", "privacy")
        return settings.build(PlannedTraining({"a": 32}, gradients_per_round={"a": 1}, rounds=200))

    tight, paper = plan(), plan(noise_calibration="paper_rdp")
    # Rounded to the next number of float32, on the safe side.
    expected = paper_noise_multiplier(6.0, 1e-3, 1.0, 200)
    assert paper.mechanisms["a"].noise_multiplier == pytest.approx(expected, rel=gamma(2))
    assert tight.mechanisms["a"].noise_multiplier == as_printed("8.462", CALIBRATED)
    assert paper.build_ledger() is not None
    with pytest.raises(ConfigError, match=r"privacy\.noise_calibration must be one of .*, not 'hopeful'"):
        plan(noise_calibration="hopeful")


@pytest.mark.parametrize(("label", "true"), [(0.1, 0.0135), (0.5, 0.077), (1, 0.167), (3, 0.54), (10, 2.8), (20, 19.2)])
def test_true_epsilons_of_asymptotic_labels(label, true):
    """Silos of 6000 images, batches of 64, and 20 rounds of 93 steps, as in the PFA paper."""
    noise = asymptotic_noise_multiplier(label, 1e-5, 64 / 6000, 20 * 93)
    assert noise == pytest.approx(10 * 64 / 6000 * math.sqrt(1860 * 5) / label)
    found = epsilon_bounds(poisson_gaussian_event(64 / 6000, noise, 1860), 1e-5)
    assert found.rdp == pytest.approx(true, rel=0.02)


def test_with_small_batches_a_label_is_a_fortieth_of_the_true_epsilon():
    noise = asymptotic_noise_multiplier(10, 1e-5, 4 / 6000, 8000)
    found = epsilon_bounds(poisson_gaussian_event(4 / 6000, noise, 8000), 1e-5)
    assert found.rdp == pytest.approx(438, rel=0.02)
    assert found.best == pytest.approx(390, rel=0.02)


@pytest.mark.parametrize(("epsilon", "least", "most"), [(0.1, 14.5, 16.3), (10, 0.60, 0.64)])
def test_noise_of_the_pfa_papers_silos(epsilon, least, most):
    """The papers' 20 rounds of 93 steps, and one to find the groups."""
    assert least < calibrate_noise_multiplier(epsilon, 1e-5, 64 / 6000, 21 * 93) < most
