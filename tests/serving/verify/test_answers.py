import numpy as np
import pytest

from serving.verify.answers import check_answers
from tff_pdp.errors import ServingError


def floats(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("actual", "right"),
    [
        (floats(0.5, 1e4), floats(0.50009, 10_000.9)),
        (floats(-1e4), floats(-10_000.9)),
        (floats(), floats()),
        (np.array([True, False]), np.array([True, False])),
        (np.array([b"a", b"\xc3\xa9"], object), np.array(["a", "é"], object)),
        (np.array([b"a"], object), np.array(["a"])),
        (np.array([3]), np.array([3])),
    ],
)
def test_equal_answers_pass(actual, right):
    check_answers("it", {"y": actual, "other": floats(7)}, {"y": right})


@pytest.mark.parametrize(
    ("actual", "right", "message"),
    [
        (floats(0.5, 0.5), floats(0.5002, 0.5), "y differ by 0.0002, more than 0.0001"),
        (floats(1e4), floats(1.0002e4), "y differ by 0.0002, more than 0.0001"),
        (floats(np.nan), floats(0.5), "differ by nan"),
        (floats(np.inf), floats(0.5), "differ by inf"),
        (floats(np.nan), floats(np.nan), "differ by nan"),
        (floats(np.inf), floats(np.inf), "differ by nan"),
        (floats(0.5).astype(np.float64), floats(0.5), r"y is float64 \(1,\) instead of float32 \(1,\)"),
        (floats(0.5), floats(0.5, 0.5), r"y is float32 \(1,\) instead of float32 \(2,\)"),
        (np.array([True, False]), np.array([True, True]), "1 of 2 values that are not equal"),
        (np.array([b"a"], object), np.array(["b"], object), "1 of 1 values that are not equal"),
        (np.array([2**53 + 1]), np.array([2**53]), "1 of 1 values that are not equal"),
    ],
)
def test_other_answers_are_refused(actual, right, message):
    with pytest.raises(ServingError, match=f"^it answers differently from the model: .*{message}"):
        check_answers("it", {"y": actual}, {"y": right})


def test_a_missing_answer_is_refused():
    with pytest.raises(ServingError, match=r"it has no answer 'y', but \['z'\]"):
        check_answers("it", {"z": floats(1)}, {"y": floats(1)})
