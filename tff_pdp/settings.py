"""Reads mappings of YAML into frozen dataclasses, arguments and numbers; every error names the file and the key."""

import contextlib
import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

import yaml

from tff_pdp.errors import ConfigError


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a repeated key, of which YAML silently keeps the last: it may be a silo's budget."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping; raises ConstructorError where a key occurs twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs more than once", node.start_mark
                )
        return super().construct_mapping(node, deep)


def build_settings(kind: type, content: Any, source: str, key: str) -> Any:
    """Builds a dataclass from a mapping, naming the full key in every error."""
    place = f"{source}: {key or 'the file'}"
    if not isinstance(content, Mapping):
        raise ConfigError(f"{place} must be a mapping, not {content!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    _check_known(content, fields, source, key)
    values = {}
    for name, field in fields.items():
        if name in content:
            values[name] = _convert(hints[name], content[name], source, _join(key, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{source}: missing key {_join(key, name)!r}")
    return kind(**values)


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], source: str, key: str) -> dict[str, Any]:
    """Checks a mapping of a configuration against the keyword-only parameters of the function that it is for.

    Args:
      function: what will be called with the result; its parameters have type hints.
      given: the mapping at `key`.
      source: who asks, the beginning of error messages.
      key: dotted key of the mapping.

    Raises:
      ConfigError: a key is unknown, missing or of the wrong type.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    _check_known(given, parameters, source, key)
    for name, parameter in parameters.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"{source}: missing key {_join(key, name)!r}")
    hints = typing.get_type_hints(function)
    return {name: _convert(hints[name], value, source, _join(key, name)) for name, value in given.items()}


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


def positive_number(key: str, value: Any) -> float:
    """Returns a positive, finite number.

    Raises:
      ConfigError: it is not.
    """
    found = number(key, value)
    if not 0 < found < math.inf:
        raise ConfigError(f"{key} is {value!r}; it must be positive and finite.")
    return found


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


def _check_known(content: Mapping[str, Any], known: Collection[str], source: str, key: str) -> None:
    for name in content:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known) or 'none'}"
            raise ConfigError(f"{source}: unknown key {_join(key, name)!r}; {hint}")


def _convert(hint: Any, value: Any, source: str, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build_settings(typing.cast(type, hint), value, source, key)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        *others, last = [option for option in arguments if option is not type(None)]
        if value is None and type(None) in arguments:
            return None
        for option in others:
            with contextlib.suppress(ConfigError):
                return _convert(option, value, source, key)
        return _convert(last, value, source, key)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(arguments[0], member, source, key) for member in value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str) and isinstance(value, hint) and not isinstance(value, bool):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return dict(value)
    wanted = getattr(origin or hint, "__name__", str(hint)).lower()
    raise ConfigError(f"{source}: {key!r} must be a {wanted}, not {value!r}")


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
