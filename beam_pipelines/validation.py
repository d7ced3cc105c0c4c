"""What makes a user or an example usable: each check returns the reason why it is not, and what to quote for it."""

import dataclasses
from typing import Any

import numpy as np

from beam_pipelines.records import Reason, Unusable, UserRecord

_LARGEST = float(np.finfo(np.float32).max)


def user_problem(user: UserRecord) -> tuple[Reason | None, Any]:
    """Judges a user as a whole: `(reason, what to quote)`, or `(None, None)` for a sound one."""
    if user.problem is not None:
        return user.problem.reason, user.problem.found
    if user.x is None and user.y is None:
        return Reason.MISSING_USER_DATA, user.num_samples
    if user.repeated_key:
        return Reason.REPEATED_KEY, None
    if not isinstance(user.x, list) or not isinstance(user.y, list):
        return Reason.MALFORMED_USER, user.y if isinstance(user.x, list) else user.x
    if len(user.x) != len(user.y):
        return Reason.LENGTH_MISMATCH, {"x": len(user.x), "y": len(user.y)}
    for name in ("is_test", "is_validation"):
        stated = getattr(user, name)
        if stated is not None and len(stated) != len(user.x):
            return Reason.LENGTH_MISMATCH, {"x": len(user.x), name: len(stated)}
    if user.num_samples is None:
        return Reason.UNLISTED_USER, len(user.x)
    if type(user.num_samples) is not int or user.num_samples != len(user.x):
        return Reason.NUM_SAMPLES_MISMATCH, {"num_samples": user.num_samples, "x": len(user.x)}
    return None, None


@dataclasses.dataclass(frozen=True)
class ExampleRule:
    """What a valid example is.

    Attributes:
      num_values: how many numbers `x` has.
      num_classes: labels are integers in `[0, num_classes)`; 0 for a regression, whose labels are finite numbers.
      are_images: whether `x` holds pixels, in [0, 1]; otherwise any finite numbers.
    """

    num_values: int
    num_classes: int
    are_images: bool

    def problems(self, x: list[Any], y: list[Any]) -> dict[int, tuple[Reason, Any]]:
        """What is wrong with which of a user's examples, by place: `(reason, what to quote)`."""
        if self._are_all_sound(x, y):
            return {}
        judged = {place: self.problem(*example) for place, example in enumerate(zip(x, y, strict=True))}
        return {place: (reason, raw) for place, (reason, raw) in judged.items() if reason is not None}

    def problem(self, x: Any, y: Any) -> tuple[Reason | None, Any]:
        """Judges one example: `(reason, what to quote)`, or `(None, None)` for a sound one."""
        if isinstance(x, Unusable):
            return x.reason, x.found
        reason, raw = self._pixel_problem(x) if self.are_images else self._feature_problem(x)
        return (reason, raw) if reason else self._label_problem(y)

    def _are_all_sound(self, x: list[Any], y: list[Any]) -> bool:
        """Whether all of them are seen to be sound at once, which takes a fraction of the time."""
        if not x or not all(isinstance(row, np.ndarray) and row.size == self.num_values for row in x):
            return False
        values = np.stack(x)
        is_sound = np.isfinite(values).all()
        if self.are_images:
            is_sound = is_sound and values.min() >= 0 and values.max() <= 1
        return bool(is_sound) and all(self._label_problem(label)[0] is None for label in y)

    def _pixel_problem(self, x: Any) -> tuple[Reason | None, Any]:
        if not isinstance(x, np.ndarray):
            return Reason.PIXELS_NOT_NUMBERS, x
        if x.size != self.num_values:
            return Reason.PIXEL_COUNT, x
        if not np.isfinite(x).all():
            return Reason.PIXEL_NOT_FINITE, x[~np.isfinite(x)]
        if x.min() < 0 or x.max() > 1:
            return Reason.PIXEL_RANGE, x[(x < 0) | (x > 1)]
        return None, None

    def _feature_problem(self, x: Any) -> tuple[Reason | None, Any]:
        if not isinstance(x, np.ndarray):
            return Reason.FEATURES_NOT_NUMBERS, x
        if x.size != self.num_values:
            return Reason.FEATURE_COUNT, x
        if not np.isfinite(x).all():
            return Reason.FEATURE_NOT_FINITE, x[~np.isfinite(x)]
        return None, None

    def _label_problem(self, y: Any) -> tuple[Reason | None, Any]:
        # False for what is not a number, for NaN, and for integers of any length beyond float32.
        is_finite = type(y) in (int, float) and abs(y) <= _LARGEST
        if not self.num_classes:
            return (None, None) if is_finite else (Reason.LABEL_NOT_FINITE, y)
        if not is_finite or y != int(y):
            return Reason.LABEL_NOT_INTEGER, y
        return (None, None) if 0 <= y < self.num_classes else (Reason.LABEL_RANGE, y)
