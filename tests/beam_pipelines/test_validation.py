"""What single examples are refused for: features and labels, of classifications and regressions."""

import numpy as np
import pytest

from beam_pipelines.records import Reason, UserRecord
from beam_pipelines.rules import ExampleRule, user_problem


def features(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (features(-3.5, 900), None),
        (features(1, 2, 3), Reason.FEATURE_COUNT),
        (features(1, np.nan), Reason.FEATURE_NOT_FINITE),
        (features(1, np.inf), Reason.FEATURE_NOT_FINITE),
        ([1, "2"], Reason.FEATURES_NOT_NUMBERS),
    ],
)
def test_features_are_any_finite_numbers(x, reason):
    assert ExampleRule(2, 3, are_images=False).problem(x, 1)[0] is reason


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (features(0, 1), None),
        (features(0, 1.001), Reason.PIXEL_RANGE),
        (features(-0.001, 1), Reason.PIXEL_RANGE),
        (features(0, np.nan), Reason.PIXEL_NOT_FINITE),
        (features(0), Reason.PIXEL_COUNT),
        ("no list", Reason.PIXELS_NOT_NUMBERS),
    ],
)
def test_pixels_lie_between_0_and_1(x, reason):
    assert ExampleRule(2, 3, are_images=True).problem(x, 1)[0] is reason


@pytest.mark.parametrize(
    ("num_classes", "y", "reason"),
    [
        (0, -0.5, None),
        (0, 7, None),
        (0, float("nan"), Reason.LABEL_NOT_FINITE),
        (0, float("inf"), Reason.LABEL_NOT_FINITE),
        (0, 1e39, Reason.LABEL_NOT_FINITE),
        (0, 10**400, Reason.LABEL_NOT_FINITE),
        (0, "1", Reason.LABEL_NOT_FINITE),
        (0, True, Reason.LABEL_NOT_FINITE),
        (2, 1.0, None),
        (2, 0.5, Reason.LABEL_NOT_INTEGER),
        (2, float("nan"), Reason.LABEL_NOT_INTEGER),
        (2, [1, 0], Reason.LABEL_NOT_INTEGER),
        (2, 2, Reason.LABEL_RANGE),
        (2, -1, Reason.LABEL_RANGE),
    ],
)
def test_labels(num_classes, y, reason):
    assert ExampleRule(2, num_classes, are_images=False).problem(features(1, 2), y)[0] is reason


def test_flags_of_test_examples_must_be_as_many_as_the_examples():
    user = UserRecord("a", "file", [features(1)] * 2, [0, 1], num_samples=2, is_test=[True])
    assert user_problem(user) == (Reason.LENGTH_MISMATCH, {"x": 2, "is_test": 1})
