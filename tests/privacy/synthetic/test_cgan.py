import math
from typing import Any

import dp_accounting
import numpy as np
import pytest

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.accounting.accountants import epsilon_bounds, poisson_gaussian_event
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.base import GENERATORS
from tff_pdp.privacy.synthetic.cgan import MOST_PARAMETERS, DpCgan, dp_cgan
from tff_pdp.privacy.synthetic.release import plan_release, statement
from tff_pdp.settings import read_settings

INF, NAN = math.inf, math.nan


def draws_of(key=b"a key of synthetic data"):
    return ExactDraws(key)


def settings_of(**changes):
    return DpCgan(
        **{
            "examples": 30,
            "num_classes": 2,
            "steps": 2,
            "discriminator_steps": 3,
            "sampling_rate": 0.25,
            "batch_size": 50.0,
            "fakes_per_step": 6,
            "generator_units": (8,),
            "discriminator_units": (5,),
            "latents": 3,
            **changes,
        }
    )


def two_classes(n):
    """Class 0 is dark, class 1 bright, in turn."""
    y = np.arange(n) % 2
    return np.random.default_rng(0).uniform(0, 0.3, size=(n, 2, 3)) + 0.7 * y[:, None, None], y


def test_the_event_is_that_of_counts_gradients_and_drawn_noise():
    z = 1.25
    gradients = dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(z))
    expected = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.GaussianDpEvent(4 * z),
            dp_accounting.SelfComposedDpEvent(gradients, 6),
            GridNoiseDpEvent(6 * 2**18),
        ]
    )
    assert settings_of(count_noise=4.0).event(z) == expected
    # The sampler's rates are multiples of 2**-23.
    assert settings_of(sampling_rate=0.1).rate == 838861 / 2**23


def test_noise_is_calibrated_with_all_parts_of_the_event():
    planned = plan_release(settings_of(), 3.0, 1e-5)
    assert 2.99 < planned.epsilon <= 3.0
    alone = poisson_gaussian_event(0.25, planned.noise_multiplier, 6)
    assert epsilon_bounds(alone, 1e-5).best < planned.epsilon
    stated = statement(planned, [], "one row")
    assert stated["claim"] == "formal-conditional" and stated["epsilon"] == planned.epsilon
    assert "an example's gradient is taken not to depend" in stated["claim_reason"]


def test_classes_are_learned_with_little_noise():
    x, y = two_classes(400)
    settings = settings_of(
        steps=60, generator_rate=0.05, discriminator_rate=0.02, discriminator_steps=2, examples=400, batch_size=100.0
    )
    made = dp_cgan(x, y, settings, 0.01, draws_of())
    dark, bright = (made.x[made.y == label].mean() for label in (0, 1))
    assert bright - dark > 0.3 and np.bincount(made.y).tolist() == [200, 200]
    assert made.x.shape == (400, 2, 3) and made.x.dtype == np.float64 and made.y.dtype == np.int64


def test_records_that_are_in_no_batch_do_not_matter():
    x, y = two_classes(300)
    rare = settings_of(sampling_rate=1e-7)
    assert rare.rate == 2.0**-23
    first, second = (dp_cgan(records, y, rare, 1e-2, draws_of()) for records in (x, 1 - x))
    assert (first.x == second.x).all() and (first.y == second.y).all()
    often = [dp_cgan(records, y, settings_of(), 1e-2, draws_of()) for records in (x, 1 - x)]
    assert not (often[0].x == often[1].x).all()


def test_classes_without_records_get_no_examples():
    x, _ = two_classes(400)
    made = dp_cgan(x, np.where(np.arange(400) % 2, 1, 3), settings_of(num_classes=5), 1.0, draws_of())
    assert set(made.y.tolist()) == {1, 3}
    assert set(dp_cgan(x, np.zeros(400, int), settings_of(), 1.0, draws_of()).y.tolist()) == {0}


@pytest.mark.parametrize("number", [0, 1])
def test_too_few_records_are_refused_after_the_release(number):
    x, y = two_classes(4)
    with pytest.raises(DataError, match="The release has been made: its cost counts"):
        dp_cgan(x[:number], y[:number], settings_of(), 4.0, draws_of())


def test_examples_stay_in_range_whatever_the_records():
    x, y = two_classes(400)
    for place, value in enumerate((NAN, INF, -INF, 1e300, -1e300)):
        x[place::7] = value
    made = dp_cgan(x, y, settings_of(low=-1.0, high=1.0), 0.5, draws_of())
    assert np.isfinite(made.x).all() and np.abs(made.x).max() <= 1


def test_equal_keys_give_equal_bits_and_others_do_not():
    x, y = two_classes(200)
    first, again = (dp_cgan(x, y, settings_of(), 0.5, draws_of()) for _ in range(2))
    # The number of examples is public, whatever the number of records.
    other = dp_cgan(*two_classes(900), settings_of(), 0.5, draws_of(b"quite another key"))
    assert (first.x == again.x).all() and (first.y == again.y).all()
    assert len(other.x) == len(first.x) == 30 and not (first.x == other.x).all()


def test_shapes_and_labels_that_do_not_fit_are_refused_before_the_release():
    x, y = two_classes(40)
    draws = draws_of()
    for settings, records, labels, message in [
        (settings_of(), x, y[1:], "40 examples, but labels of shape"),
        (settings_of(), x[:, :0], y, "no features"),
        (settings_of(discriminator_units=(40_000,)), x, y, rf"weights; at most {MOST_PARAMETERS:,} are possible"),
        (settings_of(sampling_rate=0.5), np.zeros((40_000, 1)), np.zeros(40_000, int), "batches must have at most"),
    ]:
        with pytest.raises(ConfigError, match=message):
            dp_cgan(records, labels, settings, 0.5, draws)
    with pytest.raises(DataError, match="a label is not one of the classes 0 to 1"):
        dp_cgan(x, y + 1, settings_of(), 0.5, draws)
    for noise in (0.0, NAN, 1e5):
        with pytest.raises(ConfigError, match="noise_multiplier"):
            dp_cgan(x, y, settings_of(), noise, draws)
    assert draws.words(3).tolist() == draws_of().words(3).tolist()


def test_settings_are_found_by_kind():
    kind: Any = GENERATORS.find("dp_cgan")
    found = read_settings(kind, {"kind": "dp_cgan", "examples": 5, "generator_units": [3]}, "a.yaml", "synthetic")
    assert found.examples == 5 and list(found.generator_units) == [3]
    with pytest.raises(ConfigError, match=r"synthetic\.sampling_rate must be"):
        read_settings(kind, {"kind": "dp_cgan", "examples": 5, "sampling_rate": 1}, "a.yaml", "synthetic")
