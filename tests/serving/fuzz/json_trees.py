"""JSON as a tree that is taken apart and written with text in it that is no JSON."""

import copy
import json
from typing import Any


class Literal(str):
    """Text that goes into the body as it is."""


def paths(document: Any, prefix: tuple = ()) -> list[tuple]:
    """Keys and indices that lead to every value, the document itself first."""
    found = [prefix]
    items = document.items() if isinstance(document, dict) else enumerate(document) if is_list(document) else ()
    for key, value in items:
        found += paths(value, (*prefix, key))
    return found


def at(document: Any, path: tuple) -> Any:
    """The value at a path."""
    for key in path:
        document = document[key]
    return document


def put(document: Any, path: tuple, value: Any) -> Any:
    """A copy of a document with another value at a path."""
    if not path:
        return value
    document = copy.deepcopy(document)
    at(document, path[:-1])[path[-1]] = value
    return document


def is_list(value: Any) -> bool:
    """True for a JSON array."""
    return isinstance(value, list)


def encode(document: Any) -> bytes:
    """Writes a document, `Literal`s as they are."""
    return to_text(document).encode("utf-8", "surrogatepass")


def to_text(value: Any) -> str:
    """Writes a document, `Literal`s as they are."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {to_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_text, value)) + "]"
    if type(value) is int and abs(value) > 2**70:
        return f"1{'0' * 400}"
    return json.dumps(value)
