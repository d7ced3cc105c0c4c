"""Well-formed requests, and such for things that do not exist: names, versions, labels, methods, other paths."""

import json
import random
from collections.abc import Sequence
from urllib.parse import quote

import numpy as np

from tests.serving.fuzz import json_bodies
from tests.serving.fuzz.cases import MARKER, HttpCase, Oracle, ServedModel

_TRAVERSALS = [
    "..%2f..%2fetc%2fpasswd", "..%2F..%2F..%2F..%2Fetc%2Fpasswd", "%2fetc%2fpasswd", "%2e%2e%2f%2e%2e", "..%5c..%5cetc",
    "..", ".", "%2e", "%00", "toy%00", "toy%2f1", "toy%2f..%2ftoy", "..%252f..%252fetc", "file:%2f%2f%2fetc%2fpasswd",
    "%c0%ae%c0%ae%c0%af", "%ff%fe", "~", "~root", "$HOME", "%25s%25n", "toy%0a", "%0d%0aX-Injected:%201", "é".encode(),
    "a" * 5000, "%61" * 2000, "-", "*", "?", "toy;x=1", "toy%20", "%74oy2", "CON", "toy.tmp",
]  # fmt: skip
_VERSIONS = [
    "-1", "-0", "+1", "1.0", "1e0", "0x1", "١", "1%20", "", "%00", str(2**63), str(2**64), str(2**64 + 1), "9" * 3000,
    "latest", "1/..", "1%2f..", "0" * 5000 + "1", "0" * 5000 + "2", "2", str(2**63 - 1), "1_0", "..", MARKER,
]  # fmt: skip
_METHODS = ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get", "G", "X" * 300, "SEARCH", "PURGE", "BREW"]


def request(method: str, path: str | bytes, body: bytes = b"", headers: Sequence[bytes] = (), *, close=True) -> bytes:
    """A well-formed request."""
    target = path.encode() if isinstance(path, str) else path
    lines = [method.encode() + b" " + target + b" HTTP/1.1", b"Host: localhost", *headers]
    if close:
        lines.append(b"Connection: close")
    if body or method == "POST":
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def predict_path(served: ServedModel, rng: random.Random, verb: str = "predict") -> str:
    return f"/v1/models/{served.name}{rng.choice(['', '', '/versions/1'])}:{verb}"


def valid_body(rng: random.Random, served: ServedModel) -> tuple[bytes, np.ndarray]:
    ids = [rng.choice([*served.answers, MARKER]) for _ in range(rng.randrange(1, 4))]
    rows = [rng.randrange(len(served.examples)) for _ in ids]
    build = rng.choice([json_bodies.rows_body, json_bodies.columns_body])
    return json.dumps(build(served, ids, rows)).encode(), served.expected(ids, rows)


def paths_of_nothing(rng: random.Random, served: ServedModel) -> HttpCase:
    """Names, versions and labels that do not exist, some of them shaped like paths."""
    name = rng.choice([*_TRAVERSALS, *_TRAVERSALS, *(quote(one, safe="") for one in served.canary_names)])
    name = name if isinstance(name, bytes) else name.encode()
    text = rng.choice(_VERSIONS).encode()
    start = b"/v1/models/"
    own = start + served.name.encode()
    path = rng.choice([start + name, own + b"/versions/" + text, own + b"/labels/" + rng.choice([name, text])])
    method, end = rng.choice([("GET", b""), ("GET", b"/metadata"), ("POST", b":predict"), ("POST", b":classify")])
    body = valid_body(rng, served)[0] if method == "POST" else b""
    plain = all(33 <= byte < 127 for byte in path)
    # A name such as "..", "." or "?" is no name at all; clients and servers may resolve it before anything looks.
    return HttpCase("paths", [request(method, path + end, body)], Oracle.ODD if plain else Oracle.BROKEN)


def methods(rng: random.Random, served: ServedModel) -> HttpCase:
    path = rng.choice(
        [predict_path(served, rng), f"/v1/models/{served.name}", f"/v1/models/{served.name}/metadata", "/", "*"]
    )
    body = b"{}" if rng.random() < 0.5 else b""
    return HttpCase("methods", [request(rng.choice(_METHODS), path, body)])


def head(rng: random.Random, served: ServedModel) -> HttpCase:
    return HttpCase("head", [request("HEAD", f"/v1/models/{served.name}")])


def odd_paths(rng: random.Random, served: ServedModel) -> HttpCase:
    name = served.name
    own = f"/v1/models/{name}"
    ends = [
        "/",
        "#x",
        "?versions=1",
        ":",
        ":predict:predict",
        ":explode",
        "/versions",
        "/versions/1/labels/x",
        "%3apredict",
    ]
    others = [
        "/v1/models",
        "/v1/models/",
        "/v1",
        "/",
        "/v1/models//",
        f"//v1/models/{name}",
        f"/v1/../v1/models/{name}",
    ]
    more = [f"/v2/models/{name}", "/favicon.ico", "/monitoring/prometheus/metrics", own.upper(), "/%00", "/..%2f.."]
    path = rng.choice([*(own + end for end in ends), *others, *more, f"{own}/metadata/x"])
    method = rng.choice(["GET", "POST"])
    return HttpCase("odd paths", [request(method, path)], Oracle.ODD)
