"""Formats numbers and names clients (silos or users), alike in text, tables and figures."""

import dataclasses
import math
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class ClientWords:
    """The words for one kind of client in texts.

    Attributes:
      one: word for one client.
      many: word for several clients.
      spender: words for the client, or clients, to whom a report's stated epsilon belongs.
    """

    one: str
    many: str
    spender: str


SILOS = ClientWords("silo", "silos", spender="the silo that spent most")
USERS = ClientWords("user", "users", spender="every user")


MISSING = "–"


def plain(value: float | None) -> str:
    """Formats a number: three significant digits, whole from 1000 on; `∞` for infinity; a dash for None or NaN.

    >>> plain(3.14159), plain(1e-05), plain(float("inf")), plain(None)
    ('3.14', '1e-05', '∞', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def upper(value: float | None) -> str:
    """Formats a number as `plain` does, but rounded up, so that a printed privacy bound is not too small.

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
    """Formats a spent epsilon as `upper` does; infinity, which means that no epsilon holds, becomes `none`.

    >>> spent(2.0001), spent(float("inf"))
    ('2.01', 'none')
    """
    return "none" if value is not None and math.isinf(value) else upper(value)


def percent(value: float | None) -> str:
    """Formats a share as a percentage with one decimal.

    >>> percent(0.8125)
    '81.2 %'
    """
    return MISSING if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def points(value: float | None) -> str:
    """Formats a difference of shares as signed percentage points.

    >>> points(0.031), points(-0.002)
    ('+3.1', '-0.2')
    """
    return MISSING if value is None or math.isnan(value) else f"{100 * value:+.1f}"


def signed(value: float | None) -> str:
    """Formats a difference with a sign and three significant digits.

    >>> signed(0.00123), signed(-2.0), signed(0.0)
    ('+0.00123', '-2', '+0')
    """
    return MISSING if value is None or math.isnan(value) else f"{value:+.3g}"


def between(values: Sequence[float], write: Callable[[float], str] = plain) -> str:
    """Formats the range of one or more numbers by `write`; a range with equal texts at both ends is one number.

    >>> between([1.0, 2.0, 4.0]), between([3.0, 3.0])
    ('between 1 and 4', '3')
    """
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"between {low} and {high}"
