import math

import numpy as np
import pytest
from scipy import optimize

from tests.privacy.accounting.anchor_support import CALIBRATED
from tests.rounding import as_printed, gamma, half_a_digit
from tff_pdp.algorithms.auto_prox.theory import optimal_prox_weights_of_silos
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import calibrate_noise_multiplier

SILOS, EXAMPLES, DATA_VARIANCE = 20, 200, 0.4**2
UNEVEN = (0.1, 0.2, 0.4, 0.8, 1.6)
# So strong a pull leaves 1e-12 of a silo's own model: FedAvg.
FED_AVG = 1e12


# Sums over silos, and the dozen operations of each form.
FLOAT64 = gamma(3 * SILOS + 12, np.float64)
# How far a minimum that is found may lie from the true one, in lambda's logarithm: SciPy's `xatol`, and where rounding
# hides that errors rise. Near the minimum an error's second derivative is from 7e-5 (at lambda = 320) to 2 of itself.
XATOL = 1e-5
PLACE = XATOL + math.sqrt(2 * FLOAT64 / 7e-5)


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
    local = DATA_VARIANCE / EXAMPLES + (float(noise_multiplier) * clip_norm / EXAMPLES) ** 2
    assert local == as_printed_of(noise_multiplier, variance)
    variances = np.full(SILOS, local)
    found = optimal_prox_weights_of_silos(variances, spread)
    assert list(found) == [as_printed_of(noise_multiplier, weight)] * SILOS
    error = quadratic_form_error(0, found[0], variances, spread)
    assert error == as_printed_of(noise_multiplier, best)
    # The paper's own forms.
    assert found[0] == pytest.approx(local / spread, rel=FLOAT64)
    assert error == pytest.approx(local * (local + SILOS * spread) / (SILOS * (local + spread)), rel=FLOAT64)
    assert quadratic_form_error(0, FED_AVG, variances, spread) == as_printed_of(noise_multiplier, fed_avg)


def test_the_noise_of_the_anchors_is_the_calibrated_one():
    assert calibrate_noise_multiplier(0.25, 1e-5, 1.0, 1) == as_printed("13.2855", CALIBRATED)


def test_silos_of_their_own_variance_anchor():
    weights = optimal_prox_weights_of_silos(UNEVEN, 0.5**2)
    assert list(weights) == [as_printed(text) for text in ("0.2632", "0.5634", "1.3115", "3.902", "320.00")]


@pytest.mark.parametrize(
    ("variances", "silo_variance"), [(UNEVEN, 0.25), ((0.3,) * 2, 0.05), ((0.02,) * 7, 0.5), ((1.0,) * 30, 1.0)]
)
def test_no_other_weight_has_a_smaller_error(variances, silo_variance):
    weights = optimal_prox_weights_of_silos(variances, silo_variance)
    for silo, weight in enumerate(weights):
        found = optimize.minimize_scalar(
            lambda log_weight, silo=silo: quadratic_form_error(silo, math.exp(log_weight), variances, silo_variance),
            bounds=(-8, 12),
            method="bounded",
            options={"xatol": XATOL},
        )
        assert weight == pytest.approx(math.exp(found.x), rel=PLACE)
        assert quadratic_form_error(silo, weight, variances, silo_variance) == pytest.approx(found.fun, rel=PLACE**2)


def test_a_far_noisier_silo_takes_the_average():
    # Both by hand: 0.25 + (0.1 - 2) / 2 < 0, and exactly 0 at 0.6.
    np.testing.assert_array_equal(optimal_prox_weights_of_silos([0.1, 2.0], 0.25), [0.1 / 1.2, np.inf])
    np.testing.assert_array_equal(optimal_prox_weights_of_silos([[0.125, 0.625]], [0.25])[:, 1], [np.inf])
    assert quadratic_form_error(1, FED_AVG, [0.1, 2.0], 0.25) < quadratic_form_error(1, 100.0, [0.1, 2.0], 0.25)


def test_simulated_silos_have_these_errors():
    rng, draws, silo_variance = np.random.default_rng(3), 40_000, 0.25
    weights = optimal_prox_weights_of_silos(UNEVEN, silo_variance)
    centres = 7.0 + math.sqrt(silo_variance) * rng.standard_normal([draws, len(UNEVEN)])
    local = centres + np.sqrt(UNEVEN) * rng.standard_normal([draws, len(UNEVEN)])
    personal = (local + weights * local.mean(axis=1, keepdims=True)) / (1 + weights)
    squares = (personal - centres) ** 2
    standard_errors = squares.std(axis=0) / math.sqrt(draws)
    errors = [quadratic_form_error(silo, weight, UNEVEN, silo_variance) for silo, weight in enumerate(weights)]
    assert (np.abs(squares.mean(axis=0) - errors) < 4 * standard_errors).all()


def test_silos_without_any_difference_take_the_average():
    np.testing.assert_array_equal(optimal_prox_weights_of_silos([0.5, 0.5], 0.0), [np.inf, np.inf])


@pytest.mark.parametrize(
    "variances, silo_variance, named",
    [
        ([-0.1, 0.1], 0.1, "local_variances"),
        ([math.nan, 0.1], 0.1, "local_variances"),
        ([0.1, 0.1], math.inf, "silo_variance"),
        ([0.1], 0.1, "fewer than two silos"),
        (0.1, 0.1, "fewer than two silos"),
    ],
)
def test_values_out_of_range(variances, silo_variance, named):
    with pytest.raises(ConfigError, match=named):
        optimal_prox_weights_of_silos(variances, silo_variance)
