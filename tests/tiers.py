"""How much of a test runs in which tier: in `make test`, or in `make test-all` and by itself.

Most tests are chosen by the marker `all`. Where the same test has more to do, of requests or of random examples, it
asks for its amount here, and has one id in both tiers.
"""

from typing import TypeVar

T = TypeVar("T")

_is_quick = False


def begin(markexpr: str) -> None:
    """Settle the tier by the marks that a run selects, before any test module is imported."""
    global _is_quick
    _is_quick = "not all" in markexpr


def amount(*, test: T, all: T) -> T:
    """Return the amount of this run."""
    return test if _is_quick else all
