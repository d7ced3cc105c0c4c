"""Records, as a pytest plugin, the largest difference that each comparison of floats in the tests saw.

    .venv/bin/python -m pytest -p tools.bounds_seen --bounds-seen=seen.jsonl

Each line of the file has the place of a comparison, the largest difference, and the largest difference divided by the
comparison's bound. Bounds follow from arithmetic, so a share near 1 is no fault; the file shows how much room a bound
leaves on this machine. Processes of pytest-xdist append to one file; `python tools/bounds_seen.py FILE...` sums up.
"""

import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

_TESTS = str(Path(__file__).resolve().parents[1] / "tests") + os.sep
# This file has a comparison function of its own; the place of such a comparison is the line that calls the function.
_HELPERS = _TESTS + "rounding.py"
_SEEN: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])


def pytest_addoption(parser):
    """Adds the option that names the file."""
    parser.addoption("--bounds-seen", metavar="FILE", help="file to append the differences to")


def pytest_configure(config):
    """Starts to watch `numpy.testing.assert_allclose` and `pytest.approx`."""
    from _pytest import python_api

    allclose, scalar = np.testing.assert_allclose, python_api.ApproxScalar.__eq__

    def watched_allclose(actual, desired, rtol=1e-7, atol=0, *args, **kwargs):
        _note(actual, desired, rtol, atol)
        return allclose(actual, desired, rtol, atol, *args, **kwargs)

    def watched_scalar(self, actual):
        numbers = int | float | np.floating
        # Pytest raises an error for the tolerance of an expected NaN, so the plugin must not ask for it.
        if isinstance(self.expected, numbers) and isinstance(actual, numbers) and math.isfinite(self.expected):
            _note(actual, self.expected, 0.0, self.tolerance)
        return scalar(self, actual)

    np.testing.assert_allclose = watched_allclose
    python_api.ApproxScalar.__eq__ = watched_scalar


def pytest_sessionfinish(session):
    """Appends the differences that this process saw to the file."""
    path = session.config.getoption("--bounds-seen")
    if path and _SEEN:
        lines = [json.dumps([file, line, *seen]) for (file, line), seen in _SEEN.items()]
        with open(path, "a") as file:
            file.write("\n".join(lines) + "\n")


def note(difference: float, share: float) -> None:
    """Records one comparison of the calling test, for comparisons that have a function of their own."""
    place = _place()
    if place:
        seen = _SEEN[place]
        seen[0], seen[1] = max(seen[0], difference), max(seen[1], share)


def _note(actual, desired, rtol: float, atol) -> None:
    try:
        actual, desired = np.asarray(actual), np.asarray(desired)
        wide = np.complex128 if "c" in (actual.dtype.kind, desired.dtype.kind) else np.float64
        actual, desired = actual.astype(wide), desired.astype(wide)
        with np.errstate(all="ignore"):
            differences = np.abs(actual - desired)
            bounds = np.asarray(atol + rtol * np.abs(desired), np.float64)
            differences = np.where(np.isfinite(differences), differences, 0.0)
            shares = np.where(differences == 0, 0.0, differences / bounds)
        if differences.size:
            note(float(differences.max()), float(np.nanmax(shares)))
    except (TypeError, ValueError):
        return


def _place() -> tuple[str, int] | None:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_TESTS) and frame.f_code.co_filename != _HELPERS:
            return frame.f_code.co_filename[len(_TESTS) :], frame.f_lineno
        frame = frame.f_back
    return None


def main() -> int:
    """Prints, for each comparison in the named files, the largest difference and the largest share of the bound."""
    largest: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in sys.argv[1:]:
        for text in Path(name).read_text().splitlines():
            file, line, difference, share = json.loads(text)
            seen = largest[file, line]
            seen[0], seen[1] = max(seen[0], difference), max(seen[1], share)
    for (file, line), (difference, share) in sorted(largest.items()):
        print(f"{file}:{line}\t{difference:.3g}\t{share:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
