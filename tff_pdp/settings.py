"""Values of a configuration as numbers, with errors that name the key."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from tff_pdp.errors import ConfigError


def number(key: str, value: Any) -> float:
    """Returns the value as a number, which may be infinite or not a number.

    Raises:
      ConfigError: it is neither a number nor text that reads as one.

    >>> number("privacy.budgets.delta", "1e-4")
    0.0001
    """
    # YAML 1.1 reads 1e-4 as text and 1.0e-4 as a number; both are meant as numbers here.
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} is {value!r}; it must be a number.") from None


def positive_epsilon(key: str, value: Any) -> float:
    """Returns an epsilon, positive and perhaps infinite.

    Raises:
      ConfigError: it is not.
    """
    epsilon = number(key, value)
    if not epsilon > 0:
        raise ConfigError(f"{key} is {value!r}; epsilon must be positive.")
    return epsilon


def open_unit_delta(key: str, value: Any) -> float:
    """Returns a delta, strictly between 0 and 1.

    Raises:
      ConfigError: it is not.
    """
    delta = number(key, value)
    if not 0 < delta < 1:
        raise ConfigError(f"{key} is {value!r}; delta must lie strictly between 0 and 1, for example 1e-5.")
    return delta


def positive_number(key: str, value: Any) -> float:
    """Returns a positive, finite number.

    Raises:
      ConfigError: it is not.
    """
    found = number(key, value)
    if not 0 < found < math.inf:
        raise ConfigError(f"{key} is {value!r}; it must be positive and finite.")
    return found


def require_keys(key: str, value: Any, required: Collection[str], optional: Collection[str] = ()) -> Mapping[str, Any]:
    """Returns the value, a mapping with all of the required keys and no others than these and the optional ones.

    Raises:
      ConfigError: it is no mapping, or a key is missing or unknown.
    """
    known = ", ".join(f"`{name}`" for name in (*required, *optional))
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}; it must be a mapping with the keys {known}.")
    unknown = sorted(str(name) for name in value if name not in required and name not in optional)
    if unknown:
        raise ConfigError(f"{key} has the unknown key `{unknown[0]}`; known keys: {known}.")
    for name in required:
        if name not in value:
            raise ConfigError(f"{key}.{name} is missing.")
    return value
