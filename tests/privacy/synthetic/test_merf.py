import math
import subprocess
import sys
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest

from tests.privacy.synthetic.extremes import EXTREMES, clustered, squared_change
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws
from tff_pdp.privacy.synthetic import merf
from tff_pdp.privacy.synthetic.base import GENERATORS
from tff_pdp.privacy.synthetic.merf import DpMerf, Frequencies, dp_merf, draw_frequencies, embedding_steps, whole_waves
from tff_pdp.privacy.synthetic.records import MOST_VALUES
from tff_pdp.settings import read_settings

NEARLY_NONE = 1e-7


def draws_of(key=b"a key of synthetic data"):
    return ExactDraws(key)


def settings_of(**changes):
    public = {"examples": 100, "num_classes": 2, "low": -1.0, "high": 1.0, "num_features": 50, "length_scale": 0.5}
    return DpMerf(**{**public, "steps": 20, "batch_size": 64, "hidden_units": (16,), "learning_rate": 0.01, **changes})


def steps_of(x, y, settings, noise_multiplier):
    frequencies = draw_frequencies(settings, math.prod(settings.pooled_shape(x.shape[1:])))
    return embedding_steps(x, y, settings, frequencies, noise_multiplier)


@pytest.mark.parametrize("noise_multiplier", [0.05, 1.7, 1e4, NEARLY_NONE])
@pytest.mark.parametrize(
    "changes", [{}, {"length_scale": None}, {"num_features": 7, "count_share": 0.9}, {"length_scale": 1e20}]
)
def test_no_record_whatsoever_moves_the_sum_by_more_than_one(noise_multiplier, changes):
    settings = settings_of(**changes)
    records = np.concatenate([EXTREMES, np.random.default_rng(0).normal(0, 1, size=(8, 3))])
    labels = np.arange(len(records)) % 2
    whole = steps_of(records, labels, settings, noise_multiplier)
    changed = [
        squared_change(
            whole - steps_of(np.delete(records, row, 0), np.delete(labels, row), settings, noise_multiplier),
            noise_multiplier,
        )
        for row in range(len(records))
    ]
    assert max(changed) <= 1
    # Every record moves the sum by all of the bound, but for what rounding may add.
    assert noise_multiplier > 2 or min(changed) > 1 - Fraction(1, 10**4)


def test_images_move_the_sum_by_no_more_than_one_and_nobody_by_nothing():
    settings = settings_of(low=0.0, pool=2)
    images = np.random.default_rng(1).uniform(-2, 3, size=(4, 4, 6, 2))
    for image in [*images, np.full((4, 6, 2), 1e9), np.full((4, 6, 2), math.nan)]:
        alone = steps_of(image[None], np.array([1]), settings, 1.0)
        assert 0.99 < squared_change(alone, 1.0) <= 1
    assert not steps_of(images[:0], np.zeros(0, np.int64), settings, 1.0).any()


def test_cosines_and_sines_are_on_the_circle_or_within_exactly():
    # All angles of a turn, in steps of 2**-18 turns: one feature, one frequency of one turn.
    settings = DpMerf(examples=1, num_features=1)
    angles = np.arange(2**18) / 2**18
    waves = whole_waves(angles[:, None], settings, Frequencies(np.array([[2.0**32]]), 32)).astype(np.int64)
    assert (waves**2).sum(axis=1).max() <= 2**40
    expected = np.stack([np.cos(2 * np.pi * angles), np.sin(2 * np.pi * angles)], axis=1)
    # Half of one of 2**16 angles, and a rounding.
    assert np.abs(waves * 2.0**-20 - expected).max() <= np.pi / 2**16 + 2.0**-19


def test_an_embedding_is_the_same_to_the_bit_whatever_records_are_beside_it():
    settings = settings_of(pool=2)
    images = np.random.default_rng(3).normal(size=(70, 6, 10))
    frequencies = draw_frequencies(settings, 15)
    rows = whole_waves(images, settings, frequencies)
    for first, last in [(0, 1), (3, 4), (1, 70), (10, 27), (69, 70)]:
        assert (whole_waves(images[first:last], settings, frequencies) == rows[first:last]).all()


def test_products_with_frequencies_are_whole_numbers_that_float64_holds():
    for length, input_features in [(None, 3), (None, 784), (0.01, 100), (1e20, 5)]:
        frequencies = draw_frequencies(settings_of(length_scale=length), input_features)
        assert (frequencies.whole == np.trunc(frequencies.whole)).all()
        assert np.abs(frequencies.whole).sum(axis=0).max() * 2**20 <= 2**53


def test_sums_are_those_of_a_straightforward_version():
    x, y = clustered(40)
    settings, z = settings_of(), 0.5
    # Turns for each unit of features between 0 and 1 are W (high - low) / (2 pi).
    w = draw_frequencies(settings, 3).turns * 2 * math.pi / 2
    a, b = 0.3, math.sqrt(0.91)
    expected = np.zeros((2, 1 + 100))
    for row, label in zip(x, y, strict=True):
        angles = (row + 1) @ w
        waves = np.concatenate([np.cos(angles), np.sin(angles)]) / math.sqrt(50)
        expected[label] += np.concatenate([[a], b * waves])
    sums = steps_of(x, y, settings, z).astype(np.float64) * z * 2.0**-GRID_BITS
    # Angles are off by half of 2**-16 turns at most, and by what rounded features and frequencies add.
    tolerance = 40 / math.sqrt(50) * 1e-4
    assert sums[:2] == pytest.approx(expected[:, 0], abs=1e-4)
    assert sums[2:] == pytest.approx(expected[:, 1:].ravel(), abs=tolerance)


def test_the_kernel_of_many_frequencies_is_gaussian():
    settings = settings_of(num_features=20_000, length_scale=0.7)
    pair = np.array([[0.1, -0.2, 0.3], [0.5, 0.1, -0.4]])
    one, other = whole_waves(pair, settings, draw_frequencies(settings, 3)) * 2.0**-20
    distance = 0.4**2 + 0.3**2 + 0.7**2
    # The mean of 20,000 cosines has a standard error of .005 at most.
    assert one @ other / 20_000 == pytest.approx(math.exp(-distance / (2 * 0.7**2)), abs=0.02)


def test_frequencies_are_public_and_have_the_default_length_of_the_range():
    settings = settings_of(num_features=500, length_scale=None)
    first, again = (draw_frequencies(settings, 24) for _ in range(2))
    assert (first.whole == again.whole).all()
    # l = 2 sqrt(24 / 6) = 4, and the range is 2 wide: deviation 2 / 4 in angles.
    assert (first.turns * 2 * math.pi).std() == pytest.approx(0.5, rel=0.03)


def test_the_network_learns_means_spread_and_proportions_of_classes():
    x, y = clustered(4000)
    settings = settings_of(examples=4000, num_features=100, steps=300, hidden_units=(32,), length_scale=0.25)
    made = dp_merf(x, y, settings, 0.1, draws_of())
    assert made.x.shape == (4000, 3) and made.x.dtype == np.float64
    assert made.y.dtype == np.int64 and np.bincount(made.y) == pytest.approx([3000, 1000], abs=5)
    for label in (0, 1):
        real, own = x[y == label], made.x[made.y == label]
        # Classes are .5 apart in the first feature, whose deviation is .1.
        assert own.mean(0) == pytest.approx(real.mean(0), abs=0.05)
        assert own.std(0)[:2] == pytest.approx(real.std(0)[:2], abs=0.06)
        assert np.corrcoef(own.T)[0, 1] > 0.2


def test_equal_keys_give_equal_bits_and_others_do_not():
    x, y = clustered(300)
    first, again = (dp_merf(x, y, settings_of(), 1.0, draws_of()) for _ in range(2))
    other = dp_merf(x, y, settings_of(), 1.0, draws_of(b"quite another key"))
    assert (first.x == again.x).all() and (first.y == again.y).all()
    assert not (first.x == other.x).any()


def test_the_size_is_public_and_values_are_in_range():
    for n in (200, 900):
        x, y = clustered(n)
        made = dp_merf(x, y, settings_of(examples=33), 0.5, draws_of())
        assert made.x.shape == (33, 3) and np.abs(made.x).max() <= 1


def test_an_empty_class_gets_no_examples():
    x, y = clustered(1000)
    made = dp_merf(x, 2 * y, settings_of(num_classes=4), 0.5, draws_of())
    assert np.unique(made.y).tolist() == [0, 2]


def test_records_of_one_class_and_missing_values_make_finite_examples():
    x = np.full((500, 3), math.nan)
    made = dp_merf(x, np.zeros(500, np.int64), settings_of(num_classes=1), 0.5, draws_of())
    assert made.x.shape == (100, 3) and np.isfinite(made.x).all() and not made.y.any()


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_records_are_refused_after_the_release(n):
    with pytest.raises(DataError, match="The release has been made: its cost counts"):
        dp_merf(np.zeros((n, 3)), np.zeros(n, np.int64), settings_of(), 1.0, draws_of())


def test_a_fit_that_diverges_is_refused_after_the_release(monkeypatch):
    x, y = clustered(300)
    monkeypatch.setattr(merf, "fit_network", lambda *_: lambda labels: np.full((len(labels), 3), math.nan))
    with pytest.raises(DataError, match=r"diverges at learning_rate 0\.01.*its cost counts"):
        dp_merf(x, y, settings_of(), 0.5, draws_of())


def test_pooled_images_have_the_shape_of_the_records():
    images = np.random.default_rng(2).uniform(size=(500, 4, 6, 1))
    made = dp_merf(images, np.zeros(500, np.int64), settings_of(low=0.0, pool=2), 0.1, draws_of())
    squares = made.x.reshape(100, 2, 2, 3, 2, 1)
    assert (squares == squares[:, :, :1, :, :1]).all()
    assert made.x.shape == (100, 4, 6, 1) and made.x.min() >= 0


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((2, 3), {"pool": 2}, "pool is 2, but examples have the shape"),
        ((2, 0), {}, "no features"),
        ((2, 3), {"num_features": 20_000, "num_classes": 30}, rf"at most {MOST_VALUES:,} are possible"),
        ((2, 3), {"length_scale": 1e-6}, "length_scale is 1e-06, which is too short for features 2 apart"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_release(shape, changes, message):
    draws, settings = draws_of(), settings_of(**changes)
    for call in (lambda x, y: dp_merf(x, y, settings, 1.0, draws), settings.check):
        with pytest.raises(ConfigError, match=message):
            call(np.zeros(shape), np.zeros(2, np.int64))
    with pytest.raises(DataError, match="a label is not one of the classes"):
        dp_merf(np.zeros((1, 3)), np.array([-1]), settings_of(), 1.0, draws)
    with pytest.raises(ConfigError, match="noise_multiplier"):
        dp_merf(np.zeros((1, 3)), np.array([0]), settings_of(), 0.0, draws)
    assert draws.words(3).tolist() == draws_of().words(3).tolist()


def test_the_event_is_one_gaussian_and_the_kind_is_found():
    assert settings_of().event(1.25) == dp_accounting.GaussianDpEvent(1.25)
    kind = GENERATORS.find("dp_merf")
    found = read_settings(kind, {"kind": "dp_merf", "examples": 5, "hidden_units": [8, 9]}, "a.yaml", "synthetic")
    assert isinstance(found, DpMerf) and tuple(found.hidden_units) == (8, 9)
    with pytest.raises(ConfigError, match=r"synthetic\.num_features must be a whole number"):
        read_settings(kind, {"kind": "dp_merf", "examples": 5, "num_features": 0}, "a.yaml", "synthetic")


def test_a_check_does_not_import_tensorflow():
    code = (
        "import sys, numpy as np\n"
        "from tff_pdp.privacy.synthetic.merf import DpMerf\n"
        "DpMerf(examples=1).check(np.zeros((1, 2)), np.zeros(1, int))\n"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)
