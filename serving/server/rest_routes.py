"""Paths of the REST API: what a request line asks for."""

import dataclasses
import re
import urllib.parse

from serving.errors import invalid_argument
from serving.saved_model.layout import MAX_VERSION
from serving.server.manager import ModelSpec

PREDICT, CLASSIFY, REGRESS, STATUS, METADATA = "predict", "classify", "regress", "status", "metadata"

_API_PREFIX = "/v1/"
# A name is a key to compare, never a path to open; it may hold anything but the characters that end it.
_VERSION = r"(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
_PATHS = {
    "POST": re.compile(rf"/v1/models/(?P<name>[^/:]+){_VERSION}:(?P<method>predict|classify|regress)", re.IGNORECASE),
    "GET": re.compile(rf"/v1/models(?:/(?P<name>[^/:]+))?{_VERSION}(?:/(?P<method>metadata))?", re.IGNORECASE),
}


@dataclasses.dataclass(frozen=True)
class Route:
    """What one request asks for.

    Attributes:
      method: `predict`, `classify`, `regress`, `status` or `metadata`.
      spec: which model and version.
    """

    method: str
    spec: ModelSpec


def is_in_api(path: str) -> bool:
    """Whether a path is one of the API, well-formed or not."""
    return path.lower().startswith(_API_PREFIX)


def find_route(http_method: str, path: str) -> Route:
    """Reads a request line of the API.

    Args:
      http_method: such as `GET`, in capitals.
      path: still percent-encoded, without the query.

    Raises:
      RequestError: INVALID_ARGUMENT for none of its paths and methods.
    """
    match = _PATHS[http_method].fullmatch(path) if http_method in _PATHS else None
    method = (match["method"] or STATUS) if match else ""
    if match is None or method != method.lower():
        raise invalid_argument(f"Malformed request: {http_method} {path}")
    if match["name"] is None:
        raise invalid_argument("Missing model name in request.")
    label = match["label"]
    return Route(
        method,
        ModelSpec(
            urllib.parse.unquote(match["name"]),
            _to_version(match["version"]),
            None if label is None else urllib.parse.unquote(label),
        ),
    )


def _to_version(digits: str | None) -> int | None:
    if digits is None:
        return None
    # Compared as text first: Python refuses to turn thousands of digits into an int, zeros included.
    significant = digits.lstrip("0") or "0"
    if len(significant) > len(str(MAX_VERSION)) or int(significant) > MAX_VERSION:
        raise invalid_argument(f"Failed to convert version: {digits} to numeric.")
    return int(significant)
