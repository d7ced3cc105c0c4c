"""Bodies of REST requests: valid ones written oddly, and valid ones with one thing broken."""

import base64
import copy
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.serving.fuzz.cases import MARKER, NUMERIC_MARKER, Oracle, ServedModel
from tests.serving.fuzz.json_trees import Literal, at, encode, is_list, paths, put, to_text


class Body(NamedTuple):
    """A body, the verb it goes to, and what may come back."""

    kind: str
    verb: str
    content: bytes
    oracle: Oracle
    expected: np.ndarray | None = None


_HUGE_NUMBERS = ["1e400", "-1e400", "9" * 5000, "0." + "1" * 5000, "1E+999999999999", "-0", "1e-999999", str(2**64)]
_NOT_NUMBERS = ["NaN", "Infinity", "-Infinity", "nan", "inf", "+1", "01", "0x10", ".5", "1.", "1_000", "--1", "1e"]
_BROKEN_TEXTS = ['"\\ud800"', '"\\udfff\\ud800"', '"\\x41"', '"\\u12"', '"tab\tin"', "'single'", '"\x00"', "undefined"]
_DEEP = ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000]


def hostile_value(rng: random.Random) -> Any:
    """A JSON value of any kind that probably does not belong where it is put."""
    return rng.choice(
        [
            lambda: rng.choice([None, True, False, 0, -1, 2**31, 2**63, 2**64, 10**400, 1e308, NUMERIC_MARKER]),
            lambda: rng.choice(["", MARKER, "1", "NaN", "\ud800", "\x00", "\u202e", "😀" * 10, "../../etc/passwd"]),
            lambda: rng.choice([[], {}, [[]], [{}], {"b64": ""}, [None], [[], [1]], {"": ""}, {"b64": {}}]),
            lambda: {"b64": rng.choice([MARKER, "?", "====", "YQ", "YQ=", "Y Q==", "YQ==\n", "\u00e9", 7, None, [1]])},
            lambda: {"b64": "YQ==", rng.choice(["b64 ", "x", ""]): 1},
            lambda: Literal(rng.choice(_HUGE_NUMBERS + _NOT_NUMBERS + _BROKEN_TEXTS)),
            lambda: [rng.choice([0, 1.5, "a", None, True, [], {}]) for _ in range(rng.randrange(6))],
            lambda: {f"key{i}": rng.randrange(9) for i in range(rng.randrange(50))},
        ]
    )()


def rows_body(served: ServedModel, ids: list, rows: list[int]) -> dict[str, Any]:
    """A valid body of `instances`."""
    xs = [served.examples[row].tolist() for row in rows]
    return {"instances": [{"client_id": one, "x": x} for one, x in zip(ids, xs, strict=True)]}


def columns_body(served: ServedModel, ids: list, rows: list[int]) -> dict[str, Any]:
    """A valid body of `inputs`."""
    return {"inputs": {"client_id": ids, "x": served.examples[rows].tolist()}}


def generate(rng: random.Random, served: ServedModel) -> Body:
    """Makes one body."""
    return rng.choices([make for make, _ in _GENERATORS], [weight for _, weight in _GENERATORS])[0](rng, served)


def _draw(rng: random.Random, served: ServedModel) -> tuple[list[str], list[int]]:
    count = rng.choice([1, 1, 1, 2, 3, 5])
    known = list(served.answers)
    ids = [rng.choice([*known, f"{MARKER}{rng.randrange(10**9)}"]) for _ in range(count)]
    return ids, [rng.randrange(len(served.examples)) for _ in range(count)]


def _valid(rng: random.Random, served: ServedModel) -> tuple[dict[str, Any], np.ndarray]:
    ids, rows = _draw(rng, served)
    document = rng.choice([rows_body, columns_body])(served, list(ids), rows)
    if rng.random() < 0.3:
        document["signature_name"] = rng.choice(["serving_default", "predict", ""])
    return document, served.expected(ids, rows)


def _valid_written_oddly(rng: random.Random, served: ServedModel) -> Body:
    """Spaces, escapes, order of keys, exponents and base64 change nothing about the values."""
    ids, rows = _draw(rng, served)
    sent = [{"b64": base64.b64encode(one.encode()).decode()} if rng.random() < 0.3 else one for one in ids]
    document = rng.choice([rows_body, columns_body])(served, sent, rows)
    if rng.random() < 0.3:
        document = {"signature_name": "predict", **document}
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
    if rng.random() < 0.3:
        # No character of a number or a literal: only texts hold these.
        text = text.replace("client_id", "\\u0063lient\\u005fid")
    if rng.random() < 0.3:
        text = " \t\r\n" * rng.randrange(1, 50) + text + "\n" * rng.randrange(50)
    return Body("written oddly", "predict", text.encode(), Oracle.ANSWERED, served.expected(ids, rows))


def _one_value_replaced(rng: random.Random, served: ServedModel) -> Body:
    document, _ = _valid(rng, served)
    path = rng.choice(paths(document))
    change = rng.choice([_replace, _replace, _replace, _remove, _nest, _repeat_key])
    return Body("value replaced", "predict", encode(change(rng, document, path)), Oracle.ODD)


def _number_as_text_or_bool(rng: random.Random, served: ServedModel) -> Body:
    document, _ = _valid(rng, served)
    path = rng.choice([path for path in paths(document) if isinstance(at(document, path), float)])
    value = rng.choice([str(at(document, path)), True, False, None, {"b64": "MS4w"}])
    return Body("number as another type", "predict", encode(put(document, path, value)), Oracle.REFUSED)


def _ragged(rng: random.Random, served: ServedModel) -> Body:
    document, _ = _valid(rng, served)
    lists = [path for path in paths(document) if path and path[-1] != "instances" and is_list(at(document, path))]
    path = rng.choice([path for path in lists if "x" in path])
    values = at(document, path)
    changed = rng.choice([[*values, values[0]], values[:-1], [], [values, values], values[0]])
    return Body("ragged", "predict", encode(put(document, path, changed)), Oracle.REFUSED)


def _not_finite(rng: random.Random, served: ServedModel) -> Body:
    document, _ = _valid(rng, served)
    path = rng.choice([path for path in paths(document) if isinstance(at(document, path), float)])
    value = Literal(rng.choice(["NaN", "Infinity", "-Infinity", "1e39", "-1e39", "1e400"]))
    return Body("not finite", "predict", encode(put(document, path, value)), Oracle.REFUSED)


def _bytes_mutated(rng: random.Random, served: ServedModel) -> Body:
    content = bytearray(encode(_valid(rng, served)[0]))
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return Body("bytes mutated", "predict", bytes(content), Oracle.ODD)


def _truncated(rng: random.Random, served: ServedModel) -> Body:
    content = encode(_valid(rng, served)[0])
    return Body("cut", "predict", content[: rng.randrange(len(content))], Oracle.REFUSED)


def _around(rng: random.Random, served: ServedModel) -> Body:
    """Marks and text before and after the document, and other encodings of it: read the same or refused."""
    document, expected = _valid(rng, served)
    content = encode(document)
    around = rng.choice(
        [
            b"\xef\xbb\xbf" + content,
            content + rng.choice([b"x", b"}", b"]", b"\0", b"{}", content, b"\xff", MARKER.encode()]),
            b"/* */" + content,
            b")]}'\n" + content,
            content.decode().encode("utf-16"),
            content.decode().encode("utf-32"),
            b"[" + content + b"]",
        ]
    )
    return Body("text around", "predict", around, Oracle.ODD, expected)


def _deep(rng: random.Random, served: ServedModel) -> Body:
    if rng.random() < 0.5:
        return Body("deep", "predict", rng.choice(_DEEP).encode(), Oracle.REFUSED)
    document, _ = _valid(rng, served)
    path = rng.choice([path for path in paths(document) if path])
    changed = put(document, path, Literal(rng.choice([_DEEP[1], _DEEP[3]])))
    return Body("deep inside", "predict", encode(changed), Oracle.REFUSED)


def _long(rng: random.Random, served: ServedModel) -> Body:
    """A megabyte of one thing. A long id is only an unknown one."""
    size = rng.choice([1 << 16, 1 << 20])
    row = rng.randrange(len(served.examples))
    if rng.random() < 0.4:
        document = rows_body(served, [MARKER + "i" * size], [row])
        return Body("long id", "predict", encode(document), Oracle.ANSWERED, served.expected([MARKER], [row]))
    long_text = json.dumps(MARKER + "s" * size)
    content = rng.choice(
        [
            long_text,
            f'{{"instances": {long_text}}}',
            f'{{"signature_name": {long_text}, "instances": [1]}}',
            f'{{{long_text}: 1, "instances": []}}',
            '{"instances": [' + "[],".join([""] * (size // 3)) + "[]]}",
            '{"instances": [' + '{"x":1},'.join([""] * (size // 8)) + "{}]}",
            '{"inputs": {"client_id": ["a"], "x": [' + "9," * (size // 2) + "9]}}",
            '{"inputs": {' + ",".join(f'"k{i}":1' for i in range(size // 64)) + "}}",
            "9" * size,
            '"' + "\\u0000" * (size // 6) + '"',
        ]
    )
    return Body("long", "predict", content.encode(), Oracle.REFUSED)


_WRONG_DOCUMENTS = [
    b"", b" ", b"null", b"true", b"0", b'""', b"[]", b"{}", b"\0", b"\xff\xfe", b"{", b'{"instances"', b"NaN",
    b'{"instances": []}', b'{"instances": {}}', b'{"inputs": []}', b'{"inputs": {}}', b'{"inputs": null}',
    b'{"instances": null}', b'{"instances": [], "inputs": {}}', b'{"signature_name": 1, "instances": [1]}',
    b'{"INSTANCES": [1]}', b'{"instances": [{}]}', b'{"instances": [null]}', b'{"instances": [{"b64": "YQ=="}]}',
]  # fmt: skip


def _wrong_document(rng: random.Random, served: ServedModel) -> Body:
    content = rng.choice([*_WRONG_DOCUMENTS, rng.randbytes(rng.randrange(1, 200))])
    return Body("wrong document", rng.choice(["predict", "classify", "regress"]), content, Oracle.REFUSED)


_ODD_NAMES = [
    MARKER, "../serving_default", "__saved_model_init_op", "a" * 10_000, "\0", "é", "serving_default ", "\ud800",
]  # fmt: skip


def _names(rng: random.Random, served: ServedModel) -> Body:
    """Wrong names of signatures and inputs."""
    document, expected = _valid(rng, served)
    name = rng.choice(_ODD_NAMES)
    if rng.random() < 0.5:
        return Body("signature", "predict", encode({**document, "signature_name": name}), Oracle.REFUSED)
    if "inputs" in document:
        # As in TensorFlow Serving, columns that nobody asked for are not looked at, but rows must have the same keys.
        document["inputs"][name] = [1]
        return Body("extra column", "predict", encode(document), Oracle.ODD, expected)
    document["instances"][0][name] = 1
    return Body("extra input", "predict", encode(document), Oracle.REFUSED)


def _examples(rng: random.Random, served: ServedModel) -> Body:
    """Bodies of classify and regress, right and wrong."""
    ids, rows = _draw(rng, served)
    examples = [
        {"client_id": one, "x": np.ravel(served.examples[row]).tolist()} for one, row in zip(ids, rows, strict=True)
    ]
    document: Any = {"signature_name": rng.choice(["classify", "classify", "regress", ""]), "examples": examples}
    verb = rng.choice(["classify", "classify", "regress"])
    changes = rng.randrange(4)
    if not changes and verb == document["signature_name"] == "classify":
        return Body("examples", verb, encode(document), Oracle.ANSWERED, served.expected(ids, rows))
    if rng.random() < 0.3:
        document["context"] = {"client_id": "alice"}
    for _ in range(changes):
        path = rng.choice(paths(document))
        document = rng.choice([_replace, _remove, _nest, _rename])(rng, document, path)
        if not isinstance(document, dict | list):
            break
    return Body("examples", verb, encode(document), Oracle.ODD)


def _images(rng: random.Random, served: ServedModel) -> Body:
    content = rng.choice([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"\xff\xd8\xff\xe0", MARKER.encode()])
    image = {"b64": base64.b64encode(content).decode()}
    document = {"signature_name": "predict_images", "instances": [{"client_id": "alice", "image_bytes": image}]}
    return Body("image", "predict", encode(document), Oracle.REFUSED)


_GENERATORS: list[tuple[Callable[[random.Random, ServedModel], Body], float]] = [
    (_valid_written_oddly, 8),
    (_one_value_replaced, 30),
    (_number_as_text_or_bool, 5),
    (_ragged, 5),
    (_not_finite, 5),
    (_bytes_mutated, 15),
    (_truncated, 5),
    (_around, 6),
    (_deep, 1),
    (_long, 1),
    (_wrong_document, 5),
    (_names, 4),
    (_examples, 6),
    (_images, 2),
]


def _replace(rng: random.Random, document: Any, path: tuple) -> Any:
    return put(document, path, hostile_value(rng))


def _remove(rng: random.Random, document: Any, path: tuple) -> Any:
    if not path:
        return {}
    document = copy.deepcopy(document)
    del at(document, path[:-1])[path[-1]]
    return document


def _nest(rng: random.Random, document: Any, path: tuple) -> Any:
    return put(
        document, path, rng.choice([list, lambda value: [[value]], lambda value: {"b64": value}])([at(document, path)])
    )


def _rename(rng: random.Random, document: Any, path: tuple) -> Any:
    """Gives an object's first key an odd name."""
    value = at(document, path)
    if not isinstance(value, dict) or not value:
        return _replace(rng, document, path)
    (_, first), *others = value.items()
    return put(document, path, {rng.choice(_ODD_NAMES): first, **dict(others)})


def _repeat_key(rng: random.Random, document: Any, path: tuple) -> Any:
    """Writes an object's first key twice; which one counts is up to the parser."""
    value = at(document, path)
    if not isinstance(value, dict) or not value:
        return _replace(rng, document, path)
    key = next(iter(value))
    pair = f"{json.dumps(key)}: {to_text(rng.choice([value[key], hostile_value(rng)]))}"
    return put(document, path, Literal("{" + pair + ", " + to_text(value)[1:]))
