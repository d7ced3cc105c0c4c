"""The automatic lambda on linear dynamics whose curvature, force and noise are known."""

import io
import math

import numpy as np
import pytest

from tests.rounding import gamma, standard_errors
from tff_pdp.algorithms.auto_prox import lambdas as auto_prox
from tff_pdp.algorithms.auto_prox.estimates import SiloParameters, curvature_from, gradient_variance_from
from tff_pdp.errors import ConfigError

LEARNING_RATE = 0.05
NUM_WEIGHTS = 64  # So the model has curvature in a quarter of all directions, four times the mean.
CURVED = NUM_WEIGHTS // 4
# Of seeds that would fail a test of one number by chance.
ALARM = 1e-3


def parameters(num_silos=40, rounds=200, **changes):
    values = {
        "local_steps": np.full(num_silos, 3),
        "num_examples": np.full(num_silos, 10**9),
        "clip_norm": np.ones(num_silos),
        "noise_multiplier": np.ones(num_silos),
        "sampling_rate": np.ones(num_silos),
        "expected_batch_size": np.full(num_silos, 10.0),
    }
    return SiloParameters(learning_rate=LEARNING_RATE, rounds=rounds, **{**values, **changes})


def simulate(silos, *, spread, curvature=2.0, extra_variance=0.0, seed=0, stop=None, state=None):
    """Runs SGD on `curvature * |w - theta_k|^2 / 2` in the curved directions, and nothing but noise in the others.

    The theta_k have the standard deviation `spread`. Returns the state after `stop` rounds.
    """
    rng = np.random.default_rng(seed)
    theta = np.zeros([silos.num_silos, NUM_WEIGHTS])
    theta[:, :CURVED] = 1 + spread * rng.normal(size=[silos.num_silos, CURVED])
    curvatures = np.where(np.arange(NUM_WEIGHTS) < CURVED, curvature, 0.0)
    stddev = np.sqrt(silos.dp_variance + extra_variance)[:, np.newaxis]
    weights = np.zeros([silos.num_silos, NUM_WEIGHTS])
    state = auto_prox.AutoProx(silos, NUM_WEIGHTS).init()
    for round_number in range(1, (stop or silos.rounds) + 1):
        mean, before = weights.mean(axis=0), weights
        prox = lambdas_of(state).astype(np.float64)[:, np.newaxis]
        for step in range(silos.local_steps.max()):
            gradient = curvatures * (weights - theta) + stddev * rng.normal(size=weights.shape)
            moved = weights - LEARNING_RATE * (gradient + prox * (weights - mean))
            weights = np.where(step < silos.local_steps[:, np.newaxis], moved, weights)
        state = auto_prox.observe(state, silos, split(before), split(weights), split(mean))
        if auto_prox.is_refresh_round(round_number, silos.rounds):
            state = auto_prox.refresh(state, silos, round_number)
    return state


def lambdas_of(state):
    return state["prox_weights"]


def estimates(state, silos):
    """Returns the estimates that lambda is set from; the force is NaN before two windows have been seen."""
    total, precision = state["force"]
    return {
        "curvature": curvature_from(state, silos),
        "gradient_variance": gradient_variance_from(state),
        "force": float(total / precision) if precision > 0 else math.nan,
        "force_stddev": float(precision**-0.5) if precision > 0 else math.nan,
    }


def variance_error(state):
    """The standard deviation of a gradient variance that is found: by chance, and as the model of the noise is off."""
    _, precision, expected = state["variance"]
    return math.sqrt(1 / precision + (0.05 * expected / precision) ** 2)


def split(weights):
    """As named tensors of two shapes."""
    lead = weights.shape[:-1]
    return {"kernel": weights[..., :60].reshape([*lead, 15, 4]), "bias": weights[..., 60:]}


def leaves(nest):
    return [leaf for value in nest.values() for leaf in (leaves(value) if isinstance(value, dict) else [value])]


def test_pulls_are_the_gradients_of_the_data():
    # A constant gradient, so that every step can be undone exactly whatever lambda and the number of steps.
    silos = parameters(3, local_steps=np.array([1, 2, 5]))
    state = auto_prox.AutoProx(silos, 2).init()
    gradient = np.array([[1.0, -2.0], [0.5, 0.0], [3.0, 4.0]])
    before = np.array([[0.3, -0.1], [0.0, 0.2], [0.6, 0.5]])
    mean, prox = before.mean(axis=0), lambdas_of(state).astype(np.float64)
    after = before.copy()
    for silo, steps in enumerate(silos.local_steps):
        for _ in range(steps):
            after[silo] -= LEARNING_RATE * (gradient[silo] + prox[silo] * (after[silo] - mean))
    state = auto_prox.observe(state, silos, {"w": before}, {"w": after}, {"w": mean})
    # Four operations in each of five steps, there and back, on weights that are divided by the rate in the end.
    bound = gamma(2 * 4 * 5, np.float64) * np.abs(after).max() / LEARNING_RATE
    np.testing.assert_allclose(state["window"]["pull"], gradient.mean(axis=0) - gradient, atol=bound)


def test_mean_curvature_is_recovered():
    silos, curvature = parameters(), 2.0
    state = simulate(silos, spread=0.05, curvature=curvature, stop=100)
    known = estimates(state, silos)
    # A regression counts directions by how far its inputs scatter: offsets that keep a share r from round to round
    # scatter by 1 / (1 - r^2), which in curved directions is less. (Far less it is not: both are moved by the noise.)
    steps, pull = silos.local_steps[0], LEARNING_RATE * lambdas_of(auto_prox.AutoProx(silos, NUM_WEIGHTS).init())[0]
    curved, flat = (1 / (1 - (1 - pull - LEARNING_RATE * h) ** (2 * steps)) for h in (curvature, 0.0))
    lowest = curvature / 4 * curved / (curved / 4 + 3 / 4 * flat)
    # The second of the two sums is the estimate's precision.
    by_chance = standard_errors(alarm=ALARM) / math.sqrt(state["curvature"][1])
    assert lowest - by_chance < known["curvature"] < curvature / 4 + by_chance


@pytest.mark.parametrize("spread", [0.05, 0.1, 0.2])
def test_force_is_recovered(spread):
    silos, curvature = parameters(), 0.5
    state = simulate(silos, spread=spread, curvature=curvature, stop=100)
    known = estimates(state, silos)
    # The force is curvature * spread in a quarter of the directions. Its square is a variance of draws for each silo
    # and curved direction, which is seen through noise: of that the second sum is the precision.
    force = (curvature * spread) ** 2 / 4
    error = math.sqrt(2 / ((silos.num_silos - 1) * CURVED) + 1 / state["force"][1] / force**2)
    assert known["force"] == pytest.approx(force, rel=standard_errors(3, ALARM) * error)


def test_gradient_variance_is_recovered_from_sampling_noise():
    silos = parameters(noise_multiplier=np.full(40, 0.2), sampling_rate=np.full(40, 0.1))
    extra = 0.7 * silos.sampling_variance(NUM_WEIGHTS)
    state = simulate(silos, spread=0.1, extra_variance=extra, stop=100)
    known = estimates(state, silos)
    assert known["gradient_variance"] == pytest.approx(0.7, abs=standard_errors() * variance_error(state))


def test_without_sampling_the_gradient_variance_stays_at_its_prior():
    silos = parameters()
    known = estimates(simulate(silos, spread=0.1, stop=100), silos)
    assert known["gradient_variance"] == pytest.approx(1 / 3)


def test_a_hundredth_of_much_noise_is_no_gradient_variance():
    # It would be three times the largest possible variance.
    silos = parameters(noise_multiplier=np.full(40, 5.0), sampling_rate=np.full(40, 0.5))
    state = simulate(silos, spread=0.1, extra_variance=0.01 * silos.dp_variance, stop=100)
    known = estimates(state, silos)
    # The prior, of variance 1/9, is moved by its own share of both variances towards what was found.
    _, precision, expected = state["variance"]
    found_by_chance = 0.01 * expected / precision + standard_errors() / math.sqrt(precision)
    share = 1 / 9 / (1 / 9 + variance_error(state) ** 2)
    assert known["gradient_variance"] == pytest.approx(1 / 3, abs=share * found_by_chance)


def test_noisy_silos_do_not_hide_what_the_others_show_of_the_gradient_variance():
    silos = parameters(noise_multiplier=np.repeat([0.2, 2.0], 20), sampling_rate=np.full(40, 0.1))
    extra = 0.7 * silos.sampling_variance(NUM_WEIGHTS)
    state = simulate(silos, spread=0.1, extra_variance=extra, stop=100)
    known = estimates(state, silos)
    assert known["gradient_variance"] == pytest.approx(0.7, abs=standard_errors() * variance_error(state))


@pytest.mark.parametrize("noise_multiplier", [1.0, 2.0, 4.0])
def test_lambda_is_near_the_best_one(noise_multiplier):
    # In a curved direction an offset has settled at p * (force + noise): its share of the loss is, up to a constant,
    # h p^2 F / 2 - p F + p * eta h V / 4, least at lambda = h c / (F - c) with c = eta h V / 4, all for that direction.
    curvature, spread = 0.5, 0.2
    silos = parameters(noise_multiplier=np.full(40, noise_multiplier))
    chosen = lambdas_of(simulate(silos, spread=spread, curvature=curvature))
    force = (curvature * spread) ** 2
    from_noise = LEARNING_RATE * curvature * silos.dp_variance[0] / 4
    best = curvature * from_noise / (force - from_noise)
    # Lambda also allows for chance in the silos' data, which is negligible here; towards FedAvg it may be off by more.
    assert np.all((best / 2 < chosen) & (chosen < 4 * best))


def test_differences_by_chance_are_no_reason_to_personalise():
    # As far apart as silos of 20 examples are by chance, where a third of C^2 is the variance of a clipped gradient.
    curvature, by_chance = 0.5, 1 / 3 / 20 / NUM_WEIGHTS
    spread = np.sqrt(4 * by_chance) / curvature
    of_few, of_many = (
        lambdas_of(simulate(parameters(num_examples=np.full(40, count)), spread=spread, curvature=curvature))
        for count in (20, 10**9)
    )
    assert np.all(of_few > 20 * of_many)


def test_equal_silos_are_pulled_as_strongly_as_is_stable():
    chosen = lambdas_of(simulate(parameters(), spread=0.0))
    np.testing.assert_allclose(chosen, 0.9 / LEARNING_RATE, rtol=gamma(2))


def test_very_different_silos_end_near_local_training():
    silos = parameters()
    first = lambdas_of(auto_prox.AutoProx(silos, NUM_WEIGHTS).init())
    chosen = lambdas_of(simulate(silos, spread=5.0))
    # Threefold less at each of the nine refreshes of the second half, as far as the noise asks for.
    assert np.all(chosen < first / 500)


def test_noisier_silos_are_pulled_more_strongly():
    noise = np.tile([1.0, 4.0], 20)
    chosen = lambdas_of(simulate(parameters(noise_multiplier=noise), spread=0.3))
    assert chosen[noise > 1].min() > 3 * chosen[noise == 1].max()


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_lambda_is_stable_in_every_round(steps, spread):
    silos = parameters(4, rounds=24, local_steps=np.full(4, steps))
    for stop in range(1, 25):
        chosen = lambdas_of(simulate(silos, spread=spread, stop=stop))
        assert chosen.dtype == np.float32
        assert np.all((chosen > 0) & (LEARNING_RATE * chosen < 1))
        if stop < 22:
            assert np.all(LEARNING_RATE * steps * chosen < 0.3001)


def test_the_first_half_is_near_fed_avg():
    silos = parameters(4, rounds=40)
    first = lambdas_of(auto_prox.AutoProx(silos, NUM_WEIGHTS).init())
    np.testing.assert_allclose(first, 0.3 / (LEARNING_RATE * 3), rtol=gamma(2))
    np.testing.assert_array_equal(lambdas_of(simulate(silos, spread=1.0, stop=20)), first)
    assert np.all(lambdas_of(simulate(silos, spread=1.0, stop=22)) < first)


def test_refreshes_are_a_twentieth_of_the_rounds_apart():
    assert [r for r in range(1, 201) if auto_prox.is_refresh_round(r, 200)] == list(range(10, 200, 10))
    assert [r for r in range(1, 8) if auto_prox.is_refresh_round(r, 7)] == [2, 4, 6]
    assert not auto_prox.is_refresh_round(1, 1)


def test_a_state_that_was_saved_goes_on_with_the_same_bits():
    silos = parameters(5, rounds=60)
    straight = simulate(silos, spread=0.3, stop=47)
    # A state is all there is: continuing from a copy that went through a file must give the same.
    copied = reloaded(simulate(silos, spread=0.3, stop=46))
    rng = np.random.default_rng(1)
    before, after = rng.normal(size=[2, 5, NUM_WEIGHTS])
    of_original, of_copy = (
        auto_prox.refresh(
            auto_prox.observe(s, silos, split(before), split(after), split(before.mean(axis=0))), silos, 48
        )
        for s in (simulate(silos, spread=0.3, stop=46), copied)
    )
    assert len(leaves(of_original)) == len(leaves(straight)) == 14
    for original, copy in zip(leaves(of_original), leaves(of_copy), strict=True):
        assert original.dtype == copy.dtype
        np.testing.assert_array_equal(original, copy)


def reloaded(nest):
    if not isinstance(nest, dict):
        file = io.BytesIO()
        np.save(file, nest, allow_pickle=False)
        file.seek(0)
        return np.load(file, allow_pickle=False)
    return {name: reloaded(value) for name, value in nest.items()}


def test_states_are_not_changed():
    silos = parameters(3)
    state = simulate(silos, spread=0.3, stop=129)
    kept = [np.copy(leaf) for leaf in leaves(state)]
    weights = split(np.ones([3, NUM_WEIGHTS]))
    auto_prox.refresh(auto_prox.observe(state, silos, weights, weights, split(np.zeros(NUM_WEIGHTS))), silos, 130)
    for was, leaf in zip(kept, leaves(state), strict=True):
        np.testing.assert_array_equal(was, leaf)


def test_two_silos_and_few_rounds_give_numbers():
    for rounds in range(1, 7):
        state = simulate(parameters(2, rounds=rounds), spread=0.3)
        assert all(np.all(np.isfinite(leaf)) for leaf in leaves(state))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": np.zeros(4)}, "noise_multiplier"),
        ({"clip_norm": np.full(4, np.inf)}, "clip_norm"),
        ({"num_examples": np.array([5, 0, 5, 5])}, "num_examples"),
        ({"sampling_rate": np.ones(3)}, "sampling_rate"),
    ],
)
def test_what_lambda_cannot_be_set_from_is_refused(changes, message):
    with pytest.raises(ConfigError, match=f"positive and finite {message}"):
        parameters(4, **changes)


def test_a_single_silo_is_refused():
    with pytest.raises(ConfigError, match="only one"):
        parameters(1)
