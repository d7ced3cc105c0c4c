"""Writes numbers, and what clients are called (silos, or users), the same in text, tables and figures."""

import dataclasses
import math
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class ClientWords:
    """The words for one kind of client.

    Attributes:
      one: a client.
      many: several of them.
      spender: whose epsilon stands for all of them.
    """

    one: str
    many: str
    spender: str


SILOS = ClientWords("silo", "silos", spender="the silo that spent most")
USERS = ClientWords("user", "users", spender="every user")


MISSING = "–"


def plain(value: float | None) -> str:
    """Three significant digits; `∞` without bound, a dash where there is no number.

    >>> plain(3.14159), plain(1e-05), plain(float("inf")), plain(None)
    ('3.14', '1e-05', '∞', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def upper(value: float | None) -> str:
    """Like `plain`, but rounded up: a privacy bound must not shrink by being printed.

    >>> upper(2.0001), upper(2.0), upper(0.12345)
    ('2.01', '2', '0.124')
    """
    if value is None or not math.isfinite(value) or value <= 0:
        return plain(value)
    exponent = math.floor(math.log10(value)) - 2
    # The tolerance keeps 0.3, stored as 0.30000000000000004 by some sum, from becoming 0.301.
    steps = math.ceil(value / 10.0**exponent * (1 - 1e-12))
    return plain(steps * 10.0**exponent)


def spent(value: float | None) -> str:
    """Like `upper`, of an epsilon that was spent: `none` where no finite one holds.

    >>> spent(2.0001), spent(float("inf"))
    ('2.01', 'none')
    """
    return "none" if value is not None and math.isinf(value) else upper(value)


def percent(value: float | None) -> str:
    """A share as per cent with one decimal.

    >>> percent(0.8125)
    '81.2 %'
    """
    return MISSING if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def points(value: float | None) -> str:
    """A difference of shares as signed percentage points.

    >>> points(0.031), points(-0.002)
    ('+3.1', '-0.2')
    """
    return MISSING if value is None or math.isnan(value) else f"{100 * value:+.1f}"


def signed(value: float | None) -> str:
    """A difference with its sign; three significant digits.

    >>> signed(0.00123), signed(-2.0), signed(0.0)
    ('+0.00123', '-2', '+0')
    """
    return MISSING if value is None or math.isnan(value) else f"{value:+.3g}"


def between(values: Sequence[float], write: Callable[[float], str] = plain) -> str:
    """The range of at least one number, each printed by `write`, or the one number if they are all printed alike.

    >>> between([1.0, 2.0, 4.0]), between([3.0, 3.0])
    ('between 1 and 4', '3')
    """
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"between {low} and {high}"
