"""How much of a test runs in which tier: in `make test`, or in `make test-all` and by itself.

Most tests are chosen by the marker `all`. Where the same test has more to do, of requests or of random examples, it
asks for its amount here, and has one id in both tiers.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_is_quick = False


def begin(markexpr: str) -> None:
    """Settle the tier by the marks that a run selects, before any test module is imported."""
    global _is_quick
    _is_quick = "not all" in markexpr


def amount(*, test: T, all: T) -> T:
    """Return the amount of this run."""
    return test if _is_quick else all


def parameters(every: Iterable[T], *, test: Iterable[T]) -> list[Any]:
    """Return a test's parameters, of which `make test` takes some and leaves the others to `make test-all`."""
    chosen = list(test)
    return [value if value in chosen else _later(value) for value in every]


def _later(value: Any) -> Any:
    # A tuple is what several arguments of a test are.
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.all)
