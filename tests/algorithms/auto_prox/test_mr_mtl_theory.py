import math

import numpy as np
import pytest
from scipy import optimize

from tests.privacy.accounting.anchor_support import CALIBRATED
from tests.rounding import as_printed, gamma, half_a_digit
from tff_pdp.algorithms.auto_prox.theory import (
    cost_of_privacy,
    errors_of_silos,
    fed_avg_error,
    gain_over_fed_avg,
    gain_over_local_training,
    local_variance,
    mr_mtl_error,
    optimal_error,
    optimal_prox_weight,
    optimal_prox_weights_of_silos,
)
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import calibrate_noise_multiplier

SILOS, EXAMPLES, DATA_VARIANCE = 20, 200, 0.4**2
UNEVEN = (0.1, 0.2, 0.4, 0.8, 1.6)


# Sums over silos, and the dozen operations of each form.
FLOAT64 = gamma(3 * SILOS + 12, np.float64)
# How far a minimum that is found may lie from the true one, in lambda's logarithm: SciPy's `xatol`, and where rounding
# hides that errors rise. Near the minimum an error's second derivative is from 7e-5 (at lambda = 320) to 2 of itself.
XATOL = 1e-5
PLACE = XATOL + math.sqrt(2 * FLOAT64 / 7e-5)


def least(function):
    return optimize.minimize_scalar(function, bounds=(-8, 12), method="bounded", options={"xatol": XATOL})


def as_printed_of(noise_multiplier, figure):
    """Of a noise that was printed itself: the local variance has its square, and nothing grows faster."""
    noise = float(noise_multiplier)
    return as_printed(figure, noise and 2 * half_a_digit(noise_multiplier) / noise)


def quadratic_form_error(silo, prox_weight, variances, silo_variance):
    """The error from the definition of the estimator: w_k - sum_j c_j (w_j + e_j), all w and e independent."""
    variances = np.asarray(variances)
    weights = np.full(len(variances), prox_weight / (1 + prox_weight) / len(variances))
    weights[silo] += 1 / (1 + prox_weight)
    centres = np.eye(len(variances))[silo] - weights
    return silo_variance * (centres**2).sum() + (weights**2 * variances).sum()


@pytest.mark.parametrize(
    "noise_multiplier, variance, silo_deviation, weight, best, fed_avg",
    [
        ("0", "8.00000e-4", 0.03, "0.8889", "4.4235e-4", "8.95000e-4"),
        ("0", "8.00000e-4", 0.08, "0.12500", "7.1556e-4", "6.12000e-3"),
        ("0", "8.00000e-4", 0.2, "0.02000", "7.8510e-4", "0.0380400"),
        ("13.2855", "5.21263e-3", 0.03, "5.7918", "9.8975e-4", "1.11563e-3"),
        ("13.2855", "5.21263e-3", 0.08, "0.81447", "2.98980e-3", "6.34063e-3"),
        ("13.2855", "5.21263e-3", 0.2, "0.13032", "4.64171e-3", "0.0382606"),
    ],
)
def test_mean_estimation_anchors(noise_multiplier, variance, silo_deviation, weight, best, fed_avg):
    clip_norm, spread = 1.0, silo_deviation**2
    local = local_variance(DATA_VARIANCE, (float(noise_multiplier) * clip_norm) ** 2, EXAMPLES)
    assert local == as_printed_of(noise_multiplier, variance)
    assert optimal_prox_weight(local, spread) == as_printed_of(noise_multiplier, weight)
    assert optimal_error(local, spread, SILOS) == as_printed_of(noise_multiplier, best)
    assert fed_avg_error(local, spread, SILOS) == as_printed_of(noise_multiplier, fed_avg)
    # The paper's own form.
    paper = local * (local + SILOS * spread) / (SILOS * (local + spread))
    assert optimal_error(local, spread, SILOS) == pytest.approx(paper, rel=FLOAT64)
    for other, gain in ((variance, gain_over_local_training), (fed_avg, gain_over_fed_avg)):
        difference, bound = float(other) - float(best), 0.0
        for figure in (other, best):
            bound += as_printed_of(noise_multiplier, figure).abs
        assert gain(local, spread, SILOS) == pytest.approx(difference, abs=bound)


def test_the_noise_of_the_anchors_is_the_calibrated_one():
    assert calibrate_noise_multiplier(0.25, 1e-5, 1.0, 1) == as_printed("13.2855", CALIBRATED)


@pytest.mark.parametrize("variance, silo_variance, silos", [(0.3, 0.05, 2), (0.02, 0.5, 7), (1.0, 1.0, 30)])
def test_equal_silos_against_brute_force(variance, silo_variance, silos):
    def brute_force(weight):
        return quadratic_form_error(0, weight, [variance] * silos, silo_variance)

    for weight in (0.0, 0.3, 1.0, 4.0, 1e9):
        assert mr_mtl_error(weight, variance, silo_variance, silos) == pytest.approx(brute_force(weight), rel=FLOAT64)
    found = least(lambda log: brute_force(math.exp(log)))
    assert optimal_prox_weight(variance, silo_variance) == pytest.approx(math.exp(found.x), rel=PLACE)
    assert optimal_error(variance, silo_variance, silos) == pytest.approx(found.fun, rel=PLACE**2)
    assert mr_mtl_error(0.0, variance, silo_variance, silos) == pytest.approx(variance)
    assert mr_mtl_error(np.inf, variance, silo_variance, silos) == fed_avg_error(variance, silo_variance, silos)


def test_silos_of_their_own_variance_anchor():
    weights = optimal_prox_weights_of_silos(UNEVEN, 0.5**2)
    assert list(weights) == [as_printed(text) for text in ("0.2632", "0.5634", "1.3115", "3.902", "320.00")]


def test_silos_of_their_own_variance_against_brute_force():
    silo_variance = 0.25
    weights = optimal_prox_weights_of_silos(UNEVEN, silo_variance)
    errors = errors_of_silos(weights, UNEVEN, silo_variance)
    for silo in range(len(UNEVEN)):

        def brute_force(log_weight, silo=silo):
            return quadratic_form_error(silo, math.exp(log_weight), UNEVEN, silo_variance)

        found = least(brute_force)
        assert errors[silo] == pytest.approx(found.fun, rel=PLACE**2)
        assert weights[silo] == pytest.approx(math.exp(found.x), rel=PLACE)
        for weight in (0.0, 0.7, 5.0):
            expected = quadratic_form_error(silo, weight, UNEVEN, silo_variance)
            assert errors_of_silos(weight, UNEVEN, silo_variance)[silo] == pytest.approx(expected, rel=FLOAT64)


def test_a_far_noisier_silo_takes_the_average():
    # Both by hand: 0.25 + (0.1 - 2) / 2 < 0, and exactly 0 at 0.6.
    np.testing.assert_array_equal(optimal_prox_weights_of_silos([0.1, 2.0], 0.25), [0.1 / 1.2, np.inf])
    np.testing.assert_array_equal(optimal_prox_weights_of_silos([[0.125, 0.625]], [0.25])[:, 1], [np.inf])
    errors = errors_of_silos(np.inf, [0.1, 2.0], 0.25)
    # A lambda of 1e12 leaves 1e-12 of the own model.
    expected = [quadratic_form_error(silo, 1e12, [0.1, 2.0], 0.25) for silo in range(2)]
    assert errors == pytest.approx(expected, rel=1e-11)
    assert errors[1] < errors_of_silos(100.0, [0.1, 2.0], 0.25)[1]


def test_equal_silos_are_a_special_case():
    variances = np.full(6, 0.3)
    np.testing.assert_allclose(optimal_prox_weights_of_silos(variances, 0.2), optimal_prox_weight(0.3, 0.2))
    np.testing.assert_allclose(errors_of_silos(0.8, variances, 0.2), mr_mtl_error(0.8, 0.3, 0.2, 6))


def test_simulated_silos_have_these_errors():
    rng, draws, silo_variance = np.random.default_rng(3), 40_000, 0.25
    weights = optimal_prox_weights_of_silos(UNEVEN, silo_variance)
    centres = 7.0 + math.sqrt(silo_variance) * rng.standard_normal([draws, len(UNEVEN)])
    local = centres + np.sqrt(UNEVEN) * rng.standard_normal([draws, len(UNEVEN)])
    personal = (local + weights * local.mean(axis=1, keepdims=True)) / (1 + weights)
    squares = (personal - centres) ** 2
    standard_errors = squares.std(axis=0) / math.sqrt(draws)
    assert (np.abs(squares.mean(axis=0) - errors_of_silos(weights, UNEVEN, silo_variance)) < 4 * standard_errors).all()


def test_the_cost_of_privacy_is_what_noise_adds():
    weights = np.array([0.0, 0.5, 3.0, np.inf])
    private, public = local_variance(0.16, [[0.0], [150.0]], 200), local_variance(0.16, 0.0, 200)
    cost = cost_of_privacy(weights, [[0.0], [150.0]], 200, SILOS)
    added = mr_mtl_error(weights, private, 0.01, SILOS) - mr_mtl_error(weights, public, 0.01, SILOS)
    np.testing.assert_allclose(cost, added, atol=FLOAT64 * private.max())
    # From all of the noise with local training to its K-th part with FedAvg.
    assert cost[1, 0] == pytest.approx(150 / 200**2)
    assert cost[1, -1] == pytest.approx(150 / 200**2 / SILOS)


def test_silos_without_any_difference_or_noise():
    assert optimal_prox_weight(0.5, 0.0) == np.inf
    assert optimal_error(0.5, 0.0, 10) == pytest.approx(0.05)
    assert optimal_error(0.0, 0.5, 10) == 0.0
    assert gain_over_fed_avg(0.0, 0.0, 10) == gain_over_local_training(0.0, 0.0, 10) == 0.0


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: local_variance(0.1, 0.0, 0), "num_examples"),
        (lambda: local_variance(-0.1, 0.0, 5), "data_variance"),
        (lambda: local_variance(0.1, math.nan, 5), "noise_variance"),
        (lambda: mr_mtl_error(-1.0, 0.1, 0.1, 5), "prox_weight"),
        (lambda: mr_mtl_error(1.0, 0.1, math.inf, 5), "silo_variance"),
        (lambda: fed_avg_error(0.1, 0.1, 0), "num_silos"),
        (lambda: optimal_prox_weight(-0.1, 0.1), "local_variance"),
        (lambda: optimal_prox_weights_of_silos([0.1], 0.1), "fewer than two silos"),
        (lambda: optimal_prox_weights_of_silos(0.1, 0.1), "fewer than two silos"),
        (lambda: errors_of_silos(math.nan, [0.1, 0.2], 0.1), "prox_weights"),
    ],
)
def test_values_out_of_range(call, named):
    with pytest.raises(ConfigError, match=named):
        call()
