"""Our epsilon against an accountant by other authors, who share no code with dp_accounting's privacy losses.

Source: Gopi, Lee and Wutschitz, "Numerical composition of differential privacy", 2021. Their accountant brackets the
true epsilon from below and above.
"""

import math

import numpy as np
import pytest
from prv_accountant import GaussianMechanism, PoissonSubsampledGaussianMechanism, PRVAccountant

from tff_pdp.privacy.accounting.accountants import calibrate_noise_multiplier, epsilon_bounds
from tff_pdp.privacy.accounting.events import poisson_gaussian_event

# Of the random settings, so many are tried in `make test`.
QUICK = 5


def bracket(mechanism, steps, delta, width):
    """Bounds from below and above that lie at most about 2 `width` apart."""
    accountant = PRVAccountant(mechanism, eps_error=width, delta_error=delta * 1e-3, max_self_compositions=steps)
    below, _, above = accountant.compute_epsilon(delta, steps)
    return below, above


def log_uniform(generator, low, high):
    return math.exp(generator.uniform(math.log(low), math.log(high)))


def random_settings(count):
    generator = np.random.default_rng(2022)
    for place in range(count):
        rate, noise = log_uniform(generator, 0.003, 0.5), log_uniform(generator, 0.9, 10)
        steps, delta = round(log_uniform(generator, 1, 2000)), log_uniform(generator, 1e-7, 1e-3)
        marks = [] if place < QUICK else [pytest.mark.all]
        yield pytest.param(rate, noise, steps, delta, id=f"{rate:.3f}-{noise:.2f}-{steps}-{delta:.0e}", marks=marks)


@pytest.mark.parametrize("rate, noise, steps, delta", random_settings(20))
def test_ours_lies_in_their_bracket(rate, noise, steps, delta):
    ours = epsilon_bounds(poisson_gaussian_event(rate, noise, steps), delta).best
    mechanism = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=noise)
    below, above = bracket(mechanism, steps, delta, width=max(0.005 * ours, 1e-3))
    assert below <= ours <= 1.01 * above
    # A wide bracket would accept anything; RDP alone, some 10 % too high, lies outside of this one.
    assert above - below <= max(0.011 * ours, 2.1e-3)


def test_calibrated_noise_meets_the_budget_by_their_account():
    noise = calibrate_noise_multiplier(2.0, 1e-5, 0.1, 300)
    below, above = bracket(PoissonSubsampledGaussianMechanism(0.1, noise), 300, 1e-5, width=0.01)
    assert below <= 2.0 <= above
    weaker, _ = bracket(PoissonSubsampledGaussianMechanism(0.1, 0.98 * noise), 300, 1e-5, width=0.01)
    assert weaker > 2.0


def test_gaussians_without_sampling():
    ours = epsilon_bounds(poisson_gaussian_event(1.0, 8.0, 50), 1e-6).best
    below, above = bracket(GaussianMechanism(8.0), 50, 1e-6, width=0.01)
    assert below <= ours <= above
