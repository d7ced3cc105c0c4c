"""The noise that is read in an upload, on uploads made by hand."""

import math

import numpy as np
import pytest

from tff_pdp.audit.readings import frame_of, noise_multiplier_of, read_noise, relative_error

RATE, CLIP, BATCH, STEPS = 0.1, 1.0, 64.0, 93


def stddev_of(noise_multiplier):
    """Noise of an upload of plain steps, by the formula."""
    return RATE * noise_multiplier * CLIP * math.sqrt(STEPS) / BATCH


def upload(noise_multiplier, signal=0.0, seed=0):
    """Steps of softmax regression on 28 x 28 pixels, of which the two outer ones are always zero."""
    generator = np.random.default_rng(seed)
    frame = frame_of((28, 28, 1), 2)
    quiet = np.repeat(frame.reshape(-1, 1), 10, axis=1)
    kernel = np.where(quiet, 0.0, signal * generator.normal(size=quiet.shape))
    bias = signal * generator.normal(size=10)
    noise_of_steps = [generator.normal(size=7850) * noise_multiplier * CLIP / BATCH for _ in range(STEPS)]
    noise = RATE * np.sum(noise_of_steps, axis=0)
    values = {"kernel": kernel + noise[:7840].reshape(784, 10), "bias": bias + noise[7840:]}
    return values, {"kernel": quiet}


def read(values, quiet=None):
    reading = read_noise(values, quiet)
    gain = RATE * math.sqrt(STEPS)
    return reading.estimator, noise_multiplier_of(reading.stddev, gain, CLIP, BATCH)


@pytest.mark.parametrize("noise_multiplier", [0.6, 14.6])
def test_quiet_coordinates_show_the_noise_whatever_the_signal(noise_multiplier):
    values, quiet = upload(noise_multiplier, signal=3 * stddev_of(noise_multiplier))
    estimator, found = read(values, quiet)
    assert estimator == "quiet"
    # 2,080 coordinates: a standard error of 1.6 %.
    assert found == pytest.approx(noise_multiplier, rel=0.05)
    # Three quarters of the coordinates have a signal that is larger than the noise.
    assert read(values)[1] > 1.5 * noise_multiplier


def test_the_median_shows_noise_that_covers_the_signal():
    values, _ = upload(14.6, signal=0.1 * stddev_of(14.6))
    estimator, found = read(values)
    assert estimator == "median"
    assert found == pytest.approx(14.6, rel=0.05)


def test_coordinates_with_a_signal_are_not_taken_for_quiet():
    values, quiet = upload(0.6)
    values["kernel"] = values["kernel"] + np.where(quiet["kernel"], 5 * stddev_of(0.6), 0.0)
    estimator, _ = read(values, quiet)
    assert estimator == "median"


def test_few_quiet_coordinates_are_not_used():
    values = {"kernel": np.linspace(-1, 1, 100)}
    mask = np.arange(100) < 49
    assert read_noise(values, {"kernel": mask}).estimator == "median"
    assert read_noise(values, {"another": mask}).num_values == 100


def test_readings_by_hand():
    # The median of 1, 2 and 3 is 2; the root of the mean of 50 ones and 50 nines is that of 5.
    reading = read_noise({"kernel": np.array([-1.0, 2.0, 3.0], np.float32)})
    assert reading.stddev == pytest.approx(2 / 0.6744897501960817)
    values = np.concatenate([np.ones(50), np.full(50, -3.0), np.full(900, 4.0)])
    reading = read_noise({"kernel": values}, {"kernel": np.arange(1000) < 100})
    assert reading == (pytest.approx(math.sqrt(5)), "quiet", 100)
    with pytest.raises(ValueError, match="without coordinates"):
        read_noise({})


def test_frames():
    assert frame_of((3, 4), 1).tolist() == [[True] * 4, [True, False, False, True], [True] * 4]
    assert frame_of((28, 28, 1), 2).sum() == 28 * 28 - 24 * 24
    assert frame_of((28, 28, 1), 0) is None
    assert frame_of((4, 28, 1), 2) is None
    assert frame_of((64,), 2) is None


def test_relative_errors():
    assert relative_error(0.9, 1.0) == pytest.approx(-0.1)
    assert relative_error(0.0, 0.0) == 0
    assert relative_error(1.0, math.inf) == math.inf
    assert relative_error(math.inf, 2.0) == math.inf
