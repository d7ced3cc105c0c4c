import math

import numpy as np
import pytest

from tests.rounding import gamma, standard_errors
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.mechanisms.feature_scaling import PaperPrivateStandardisation, Scalings
from tff_pdp.privacy.mechanisms.silo_statistics import SiloStatistics, StatisticsSettings, release_silo_statistics
from tff_pdp.settings import read_settings

NOTHING = SiloStatistics(num_examples=4)
# Shift and scale are rounded once each, their sum and product with a feature once more.
SCALED = gamma(4)
X = np.array([[[0.0, 10.0]], [[4.0, 20.0]], [[2.0, 30.0]]], np.float32)
SHAPE = X.shape[1:]
BOUNDS = {"lower": [0, 10], "upper": [[4, 30]]}


def read(config):
    return read_settings(Scalings, config, "test", "privacy.feature_scaling")


def scaled(config, statistics=NOTHING, x=X):
    scaling = read(config).scaling(statistics, x)
    assert scaling.shift.shape == scaling.scale.shape == SHAPE
    assert scaling.shift.dtype == scaling.scale.dtype == np.float32
    result = scaling.apply(x)
    assert result.dtype == np.float32
    return result


def test_no_scaling_changes_nothing():
    assert scaled({"kind": "none"}).tobytes() == X.tobytes()


def test_public_constants_are_numbers_or_lists():
    assert scaled({"kind": "public", "shift": -2, "scale": [0.5, 0.1]}) == pytest.approx(
        np.array([[[-1, 0.8]], [[1, 1.8]], [[0, 2.8]]]), rel=SCALED
    )
    np.testing.assert_array_equal(scaled({"kind": "public", "shift": 0, "scale": 0.5}), X / 2)


def test_public_bounds_become_minus_one_and_one():
    expected = np.array([[[-1, -1]], [[1, 0]], [[0, 1]]])
    assert scaled({"kind": "public_bounds", **BOUNDS}) == pytest.approx(expected, rel=SCALED)


def test_released_moments_become_zero_and_one():
    moments = read({"kind": "dp_moments", **BOUNDS, "noise_multiplier": 2}).moments(SHAPE)
    assert (moments.noise_multiplier, moments.smallest_stddev) == (2.0, 0.05)
    assert moments.lower.tolist() == [[0, 10]] and moments.upper.tolist() == [[4, 30]]
    statistics = SiloStatistics(3, mean=(2.0, 20.0), stddev=(4.0, 10.0))
    config = {"kind": "dp_moments", **BOUNDS, "noise_multiplier": 2, "smallest_stddev": 0.1}
    assert scaled(config, statistics) == pytest.approx(np.array([[[-0.5, -1]], [[0.5, 0]], [[0, 1]]]), rel=SCALED)


def test_moments_of_a_large_silo_standardise_its_features():
    # In halves of the range, both features have a mean of zero.
    stddev = 1 / 6
    x = np.random.default_rng(0).normal([3, -20], [0.5, 10], size=(20000, 2)).astype(np.float32)
    config = {"kind": "dp_moments", "lower": [0, -80], "upper": [6, 40], "noise_multiplier": 2}
    scaler = read(config)
    moments, draws = scaler.moments([2]), ExactDraws(b"a key of statistics")
    statistics = release_silo_statistics(x, StatisticsSettings(moments=moments), draws)
    result = scaler.scaling(statistics, x).apply(x)
    # Of the mean and of the mean square, which is that of twice the deviation's error.
    noise = standard_errors(4) * moments.noise_multiplier * moments.sensitivity / len(x)
    assert result.mean(axis=0) == pytest.approx([0, 0], abs=noise / stddev)
    assert result.std(axis=0) == pytest.approx([1, 1], abs=noise / stddev**2 / 2)


def test_private_scalings_do_not_look_at_the_examples():
    statistics = SiloStatistics(3, mean=(2.0, 20.0), stddev=(4.0, 10.0))
    for config in (
        {"kind": "none"},
        {"kind": "public", "shift": 1, "scale": 2},
        {"kind": "public_bounds", **BOUNDS},
        {"kind": "dp_moments", **BOUNDS, "noise_multiplier": 2},
    ):
        scaler = read(config)
        assert scaler.why_not_private == ""
        one, other = scaler.scaling(statistics, X), scaler.scaling(statistics, X[:1] * 7)
        assert one.shift.tobytes() == other.shift.tobytes() and one.scale.tobytes() == other.scale.tobytes()


def test_the_papers_variant_standardises_exactly():
    x = np.random.default_rng(0).normal([3, -20, 0], [0.5, 10, 1], size=(200, 3)).astype(np.float32)
    x[:, 2] = 0.1
    scaling = PaperPrivateStandardisation().scaling(NOTHING, x)
    result = scaling.apply(x).astype(np.float64)
    # Of a mean that is six deviations away, and of numbers that are up to four away from it.
    bound = SCALED * (6 + 4)
    assert result.mean(axis=0) == pytest.approx([0, 0, 0], abs=bound)
    # A constant feature keeps its scale, though its deviation rounds to something above zero.
    assert result.std(axis=0) == pytest.approx([1, 1, 0], abs=bound)
    assert scaling.scale[2] == 1.0


def test_in_the_papers_variant_one_record_changes_every_other_row():
    config = {"kind": "paper_private_standardisation"}
    scaler = read(config)
    x = np.random.default_rng(0).uniform(size=(50, 3)).astype(np.float32)
    x[-1] = 30.0
    with_record = scaler.scaling(NOTHING, x).apply(x)[:-1]
    without_record = scaler.scaling(NOTHING, x[:-1]).apply(x[:-1])
    assert (with_record != without_record).any(axis=1).all()
    assert np.abs(with_record - without_record).max(axis=1).min() > 0.2
    assert "no (epsilon, delta) holds" in scaler.why_not_private


def test_errors_of_the_data():
    with pytest.raises(DataError, match="without training examples"):
        PaperPrivateStandardisation().scaling(NOTHING, X[:0])
    config = {"kind": "dp_moments", **BOUNDS, "noise_multiplier": 2}
    for statistics in (NOTHING, SiloStatistics(3, mean=(1.0,), stddev=(1.0,))):
        with pytest.raises(DataError, match="lack moments of 1 x 2 features"):
            scaled(config, statistics)


MOMENTS = {"kind": "dp_moments", **BOUNDS, "noise_multiplier": 2}


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, r"missing key privacy\.feature_scaling\.kind: one of none, public, public_bounds, .*paper_private"),
        ("none", "feature_scaling must be a mapping.*, not 'none'"),
        ({"kind": "none", "shift": 1}, r"unknown key privacy\.feature_scaling\.shift; known: none"),
        ({"kind": "public", "shift": 1}, r"missing key privacy\.feature_scaling\.scale"),
        ({"kind": "public", "shift": 1, "scale": 0}, r"feature_scaling\.scale is 0 for a feature"),
        ({"kind": "public", "shift": math.nan, "scale": 1}, r"feature_scaling\.shift must be"),
        ({"kind": "public", "shift": 1, "scale": 1e39}, r"feature_scaling\.scale must be finite"),
        ({"kind": "public", "shift": [1, 2, 3], "scale": 1}, r"shift must be a number, or .* broadcasts to \(1, 2\)"),
        ({"kind": "public", "shift": "x", "scale": 1}, r"feature_scaling\.shift must be a number"),
        ({"kind": "public", "shift": 1, "scale": True}, r"feature_scaling\.scale must be a number"),
        ({"kind": "public_bounds", "lower": 1, "upper": [2, 1]}, r"feature_scaling\.lower must be below"),
        ({"kind": "public_bounds", "lower": 0, "upper": 1e-300}, r"lower must be below .*upper by more than 1e-30"),
        ({**MOMENTS, "noise_multiplier": 0}, r"feature_scaling\.noise_multiplier must be a number above 0, not 0"),
        (
            {**MOMENTS, "smallest_stddev": 0},
            r"smallest_stddev must be a number of at least 0\.001 and at most 0\.5, not 0",
        ),
        ({**MOMENTS, "smallest_stddev": 0.6}, r"feature_scaling\.smallest_stddev must be .*, not 0\.6"),
        ({"kind": "paper_private_standardisation", "lower": 0}, r"unknown key privacy\.feature_scaling\.lower"),
    ],
)
def test_errors_name_the_key(config, message):
    with pytest.raises(ConfigError, match=message):
        scaler = read(config)
        scaler.public(SHAPE)
        scaler.moments(SHAPE)
