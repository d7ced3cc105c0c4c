"""Compares the answers of an export with the answers of its model."""

from collections.abc import Mapping

import numpy as np

from tff_pdp.errors import ServingError

# In another order of additions float32 gives probabilities that differ by 1e-6, in deep networks by some 1e-5.
TOLERANCE = 1e-4


def check_answers(what: str, actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Raises ServingError if an answer differs from the right answer.

    Floating-point numbers may differ by `TOLERANCE`, in absolute terms if the right number is between -1 and 1, else in
    relative terms. NaN and infinities are never accepted. Other values, dtypes and shapes must be equal.

    Args:
      what: name of the source of the answers, for messages.
      actual: answers by key; answers with keys that are not in `expected` are ignored.
      expected: right answers by key.

    Raises:
      ServingError: an answer differs; the message names the first such answer and the difference.
    """
    for key, right in expected.items():
        if key not in actual:
            raise ServingError(f"{what} has no answer {key!r}, but {sorted(actual)}.")
        _check_answer(f"{what} answers differently from the model: {key}", actual[key], right)


def _check_answer(what: str, actual: np.ndarray, right: np.ndarray) -> None:
    right_dtype = np.dtype(object) if right.dtype.kind in "SU" else right.dtype
    if actual.dtype != right_dtype or actual.shape != right.shape:
        raise ServingError(f"{what} is {actual.dtype} {actual.shape} instead of {right_dtype} {right.shape}.")
    if right.dtype.kind != "f":
        different = sum(a != b for a, b in zip(_values(actual), _values(right), strict=True))
        if different:
            raise ServingError(f"{what} has {different} of {right.size} values that are not equal.")
        return
    with np.errstate(invalid="ignore"):
        difference = np.abs(actual - right) / np.maximum(np.abs(right), 1.0)
    worst = np.max(difference, initial=0.0)
    # Not `>`: a difference that is not a number is refused.
    if not worst <= TOLERANCE:
        raise ServingError(f"{what} differ by {worst:.2g}, more than {TOLERANCE:g}.")


def _values(array: np.ndarray) -> list:
    return [value.encode() if isinstance(value, str) else value for value in array.ravel().tolist()]
