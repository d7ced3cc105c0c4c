"""Bytes that are no image, a part of one, or claim to be far larger than they are."""

import functools
import random
import struct
import zlib

import tensorflow as tf

from tests.serving.fuzz.cases import MARKER


def _png(width: int, height: int, body: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@functools.cache
def _jpeg() -> bytes:
    return tf.io.encode_jpeg(tf.fill([64, 64, 1], tf.constant(128, tf.uint8))).numpy()


def image_bytes(rng: random.Random) -> bytes:
    """Bytes that are no image, a part of one, or claim to be far larger than they are."""
    jpeg = _jpeg()
    mutated = bytearray(jpeg)
    mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
    place = jpeg.index(b"\xff\xc0") + 5
    huge_jpeg = jpeg[:place] + struct.pack(">HH", 65_500, 65_500) + jpeg[place + 4 :]
    gif = b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\x80\0\0" + b"\0" * 6 + b","
    bmp = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    return rng.choice(
        [
            b"",
            b"\0" * 100,
            MARKER.encode(),
            bytes(rng.randrange(256) for _ in range(500)),
            _png(60_000, 60_000),
            _png(20_000, 20_000),
            _png(2**31 - 1, 2**31 - 1),
            _png(4_096, 4_096),
            _png(0, 0),
            _png(4, 4)[:-20],
            _png(5, 5, bytes(30)),
            jpeg[: rng.randrange(len(jpeg))],
            bytes(mutated),
            huge_jpeg,
            gif,
            bmp,
        ]
    )
