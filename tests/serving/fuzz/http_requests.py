"""Bytes for the REST port: requests broken at every level of HTTP, and good ones for things that do not exist."""

import functools
import gzip
import random
import zlib
from collections.abc import Callable

import numpy as np

from tests.serving.fuzz import json_bodies
from tests.serving.fuzz.cases import HttpCase, Oracle, ServedModel
from tests.serving.fuzz.http_paths import head, methods, odd_paths, paths_of_nothing, predict_path, request, valid_body

_BOMB_MEBIBYTES = 256


def generate(rng: random.Random, served: ServedModel) -> HttpCase:
    """Makes one case: often a JSON body in good HTTP, otherwise HTTP itself is under attack."""
    make = rng.choices([make for make, _ in _GENERATORS], [weight for _, weight in _GENERATORS])[0]
    return make(rng, served)


def _json(rng: random.Random, served: ServedModel) -> HttpCase:
    body = json_bodies.generate(rng, served)
    sent = request("POST", predict_path(served, rng, body.verb), body.content)
    return HttpCase(f"json: {body.kind}", [sent], body.oracle, body.expected)


def _valid(rng: random.Random, served: ServedModel, *, close=True) -> tuple[bytes, np.ndarray]:
    """A good request and its answer."""
    body, expected = valid_body(rng, served)
    return request("POST", predict_path(served, rng), body, close=close), expected


def _request_line(rng: random.Random, served: ServedModel) -> HttpCase:
    path = f"/v1/models/{served.name}".encode()
    line = rng.choice(
        [
            b"GET",
            b"GET " + path,
            b"GET  " + path + b" HTTP/1.1",
            b" GET " + path + b" HTTP/1.1",
            b"GET\t" + path + b"\tHTTP/1.1",
            b"GET " + path + b" HTTP/" + rng.choice([b"0.9", b"1.2", b"2.0", b"9.9", b"1", b"1.1.1", b"x", b"-1.1"]),
            b"GET " + path + b" HTTP/1.1 extra",
            b"GET /" + b"a" * rng.choice([8_000, 9_000, 70_000, 1_000_000]) + b" HTTP/1.1",
            b"GET " + path + b"?" + b"q=1&" * 20_000 + b" HTTP/1.1",
            b"GET \x00 HTTP/1.1",
            b"GET " + path + b"\xff\xfe HTTP/1.1",
            b"GET http://[::1 HTTP/1.1",
            b"GET http://user:password@localhost" + path + b" HTTP/1.1",
            b"GET //" + path + b" HTTP/1.1",
            b"GET * HTTP/1.1",
            b"CONNECT localhost:22 HTTP/1.1",
            b"PRI * HTTP/2.0",
            b"\xff" * 50,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"A" * 100_000,
            bytes(rng.randrange(256) for _ in range(rng.randrange(1, 300))),
            b"\r\n" * rng.randrange(1, 200),
        ]
    )
    return HttpCase("request line", [line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"])


def _headers(rng: random.Random, served: ServedModel) -> HttpCase:
    body, _ = valid_body(rng, served)
    size = b"%d" % len(body)
    length = b"Content-Length: " + size
    headers = rng.choice(
        [
            [length, b"X: " + b"a" * rng.choice([8_000, 9_000, 100_000])],
            [length, *(b"X-%d: %d" % (i, i) for i in range(rng.choice([50, 200, 5_000])))],
            [length, length],
            [length, b"Content-Length: %d" % (len(body) + 1)],
            [length, b"Transfer-Encoding: chunked"],
            [length, b"Transfer-Encoding: identity"],
            [b"Transfer-Encoding: chunked, chunked"],
            [b"Transfer-Encoding: gzip, chunked"],
            [b"Transfer-Encoding: xchunked"],
            [b"Transfer-Encoding:\x0bchunked", length],
            [b"Transfer-Encoding : chunked", length],
            [b"Content-Length: -1"],
            [b"Content-Length: +" + size],
            [b"Content-Length: 0x" + size],
            [b"Content-Length: " + size + b", " + size],
            [b"Content-Length: " + size + b" 1"],
            [b"Content-Length:"],
            [b"Content-Length: 1_0"],
            [b"Content-Length: " + b"9" * rng.choice([19, 20, 40, 5_000])],
            [b"Content-Length: %d" % 2**63],
            [b"Content-Length: \xd9\xa1"],
            [b"NoColon", length],
            [b": empty", length],
            [b"Name With Space: 1", length],
            [b"X: a\x00b", length],
            [b"X: a\r b", length],
            [b"X: a", b" folded", length],
            [b"X: \xff\xfe", length],
            [b"Host: other", length],
            [b"Expect: 100-continue", length],
            [b"Expect: banana", length],
            [b"Connection: upgrade", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA", length],
            [b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: AAAA", length],
            [b"Connection: " + b"close," * 5_000, length],
            [
                b"Content-Type: " + rng.choice([b"text/html", b"multipart/form-data; boundary=x", b"a/b; charset=x"]),
                length,
            ],
            [b"Range: bytes=0-0", b"If-Match: *", length],
            [b"Cookie: " + b"a=b; " * 1_500, length],
            [b"X-HTTP-Method-Override: DELETE", length],
            [],
        ]
    )
    head = [b"POST " + predict_path(served, rng).encode() + b" HTTP/1.1", b"Host: localhost", *headers]
    return HttpCase("headers", [b"\r\n".join(head) + b"\r\n\r\n" + body])


def _line_ends(rng: random.Random, served: ServedModel) -> HttpCase:
    sent, expected = _valid(rng, served)
    head, _, body = sent.partition(b"\r\n\r\n")
    end = rng.choice([b"\n", b"\r", b"\n\r", b"\r\r\n", b"\x00\r\n", b"\x0b"])
    return HttpCase("line ends", [head.replace(b"\r\n", end) + end + end + body], expected=expected)


def _chunks(body: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(6)))
    return [part for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True) if (part := body[start:end])]


def _chunked_head(served: ServedModel, rng: random.Random) -> bytes:
    head = request("POST", predict_path(served, rng), headers=[b"Transfer-Encoding: chunked"])
    return head.replace(b"Content-Length: 0\r\n", b"")


def _chunked(rng: random.Random, served: ServedModel) -> HttpCase:
    body, expected = valid_body(rng, served)
    coded = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in _chunks(body, rng)) + b"0\r\n\r\n"
    return HttpCase("chunked", [_chunked_head(served, rng) + coded], Oracle.ODD, expected)


def _broken_chunks(rng: random.Random, served: ServedModel) -> HttpCase:
    body, _ = valid_body(rng, served)
    size = b"%x" % len(body)
    whole = size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    coded = rng.choice(
        [
            b"-1\r\n" + body,
            b"0x" + whole,
            b"+" + whole,
            b" " + whole,
            b"f" * rng.choice([8, 16, 17, 4_000]) + b"\r\n" + body,
            b"zz\r\n" + body,
            size + b"\n" + body + b"\n0\n\n",
            size + b"\r\n" + body + b"0\r\n\r\n",
            size + b"\r\n" + body + b"xx\r\n0\r\n\r\n",
            size + b";" + b"e=1;" * 20_000 + b"\r\n" + body + b"\r\n0\r\n\r\n",
            size + b";\x00\xff\r\n" + body + b"\r\n0\r\n\r\n",
            whole[:-2] + b"Trailer: 1\r\n\r\n",
            whole[:-2] + b"T: " + b"a" * 100_000 + b"\r\n\r\n",
            whole[:-2] + b"".join(b"T%d: 1\r\n" % i for i in range(5_000)) + b"\r\n",
            whole[:-2] + b"no colon\r\n\r\n",
            whole[: rng.randrange(len(whole))],
            b"1\r\n{\r\n" * 5_000 + b"0\r\n\r\n",
            b"0\r\n\r\n",
            b"",
        ]
    )
    return HttpCase("broken chunks", [_chunked_head(served, rng) + coded], half_close=rng.random() < 0.7)


def _truncated(rng: random.Random, served: ServedModel) -> HttpCase:
    sent, _ = _valid(rng, served)
    cut = sent[: rng.randrange(len(sent))]
    return HttpCase("truncated", [cut], half_close=rng.random() < 0.5, abandon=rng.random() < 0.7)


def _abandoned(rng: random.Random, served: ServedModel) -> HttpCase:
    """The answer is not waited for."""
    return HttpCase("abandoned", [_valid(rng, served)[0] * rng.choice([1, 1, 5])], abandon=True)


def _more_than_announced(rng: random.Random, served: ServedModel) -> HttpCase:
    """A good request, then bytes that are none: a smuggled request at the most, which has its own answer."""
    sent, expected = _valid(rng, served, close=False)
    rest = rng.choice(
        [b"x", b"\0" * 5_000, b"GET /etc/passwd HTTP/1.1\r\n", bytes(rng.randrange(256) for _ in range(99))]
    )
    return HttpCase("more than announced", [sent + rest], expected=expected)


def _pipelined(rng: random.Random, served: ServedModel) -> HttpCase:
    sent, expected = _valid(rng, served, close=False)
    count = rng.randrange(2, 12)
    return HttpCase("pipelined", [sent * count], Oracle.ANSWERED, expected, num_answers=count)


def _in_pieces(rng: random.Random, served: ServedModel) -> HttpCase:
    sent, expected = _valid(rng, served)
    return HttpCase("in pieces", _chunks(sent, rng), Oracle.ANSWERED, expected)


@functools.cache
def bomb(coding: str) -> bytes:
    """Compressed zeros that expand to 256 MiB, a thousand times their size."""
    squeeze = zlib.compressobj(9, wbits=31 if coding == "gzip" else 15)
    zeros = bytes(2**20)
    return b"".join(squeeze.compress(zeros) for _ in range(_BOMB_MEBIBYTES)) + squeeze.flush()


def _compressed(rng: random.Random, served: ServedModel) -> HttpCase:
    body, expected = valid_body(rng, served)
    packed = gzip.compress(body, mtime=0)
    choices: list[tuple[bytes, bytes]] = [
        (b"gzip", packed),
        (b"deflate", zlib.compress(body)),
        (b"deflate", zlib.compress(body)[2:-4]),
        (b"identity", body),
        (b"gzip", packed[: rng.randrange(len(packed))]),
        (b"gzip", packed[:10] + bytes(rng.randrange(256) for _ in range(40))),
        (b"gzip", packed[:-8] + b"\0" * 8),
        (b"gzip", packed + packed),
        (b"gzip", packed + b"junk"),
        (b"gzip", body),
        (b"deflate", body),
        (b"gzip", b""),
        (b"gzip, gzip", gzip.compress(packed, mtime=0)),
        (b"gzip, deflate", packed),
        (b"GZIP", packed),
        (rng.choice([b"br", b"zstd", b"compress", b"x" * 1_000, b"\xff", b","]), body),
    ]
    coding, sent = rng.choice(choices)
    case = request("POST", predict_path(served, rng), sent, [b"Content-Encoding: " + coding])
    return HttpCase("compressed", [case], expected=expected if sent != packed + packed else None)


def _compression_bomb(rng: random.Random, served: ServedModel) -> HttpCase:
    coding = rng.choice(["gzip", "deflate"])
    sent = request("POST", predict_path(served, rng), bomb(coding), [b"Content-Encoding: " + coding.encode()])
    return HttpCase("compression bomb", [sent])


def _mutated(rng: random.Random, served: ServedModel) -> HttpCase:
    sent = bytearray(_valid(rng, served)[0])
    for _ in range(rng.choice([1, 2, 5, 30])):
        place = rng.randrange(len(sent))
        sent[place : place + rng.choice([0, 1, 1, 4])] = bytes([rng.randrange(256)]) * rng.choice([0, 1, 1, 3])
    return HttpCase("bytes mutated", [bytes(sent)], half_close=rng.random() < 0.5)


_GENERATORS: list[tuple[Callable[[random.Random, ServedModel], HttpCase], float]] = [
    (_json, 100),
    (_request_line, 8),
    (_headers, 16),
    (_line_ends, 3),
    (_chunked, 4),
    (_broken_chunks, 8),
    (_truncated, 8),
    (_abandoned, 4),
    (_more_than_announced, 3),
    (_pipelined, 2),
    (_in_pieces, 2),
    (_compressed, 8),
    (_compression_bomb, 0.1),
    (paths_of_nothing, 20),
    (methods, 4),
    (head, 1),
    (odd_paths, 6),
    (_mutated, 10),
]
