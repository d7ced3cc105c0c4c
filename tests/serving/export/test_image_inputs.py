import functools
import io
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from serving.export.signatures import MAX_PIXELS, decode_images, takes_images
from tests.rounding import gamma

RANDOM = np.random.default_rng(0)
# Of a level divided by 255: TensorFlow multiplies by the reciprocal, which is rounded itself; NumPy divides.
LEVEL = gamma(3)


def encode(image: Image.Image, file_format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), np.uint8))


@functools.cache
def decoder(shape: tuple[int, int, int]):
    """In a graph, as it is served."""
    return tf.function(
        lambda images: decode_images(images, shape), input_signature=[tf.TensorSpec([None], tf.string)], autograph=False
    )


def decode(contents: list[bytes], shape: tuple[int, int, int]) -> np.ndarray:
    return decoder(shape)(tf.constant(contents, tf.string)).numpy()


def png_header(width: int, height: int) -> bytes:
    """A valid PNG as far as its header, and next to no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_a_png_of_the_models_size_has_pillows_pixels(mode):
    image = noise(5, 4).convert(mode)
    content = encode(image, "PNG")
    colour = decode([content], (5, 4, 3))[0]
    np.testing.assert_allclose(colour, np.asarray(image.convert("RGB"), np.float32) / 255, rtol=LEVEL)
    grey = decode([content], (5, 4, 1))[0, :, :, 0]
    # Pillow drops transparency in the same way.
    np.testing.assert_allclose(grey, np.asarray(image.convert("RGB").convert("L"), np.float32) / 255, rtol=LEVEL)


def test_pngs_and_jpegs_may_be_mixed_and_of_any_size():
    grey, colour = noise(5, 4).convert("L"), noise(9, 7)
    contents = [encode(colour, "JPEG"), encode(grey, "PNG"), encode(grey, "JPEG", quality=95)]
    decoded = decode(contents, (5, 4, 1))
    assert decoded.shape == (3, 5, 4, 1)
    np.testing.assert_allclose(decoded[1, :, :, 0], np.asarray(grey, np.float32) / 255, rtol=LEVEL)
    pillow = np.asarray(Image.open(io.BytesIO(contents[2])), np.float32) / 255
    # Decoders of JPEG may round by a level.
    np.testing.assert_allclose(decoded[2, :, :, 0], pillow, atol=1 / 255 + LEVEL)


def test_larger_images_are_averaged_over_areas():
    image = noise(12, 20)
    decoded = decode([encode(image, "PNG")], (4, 5, 3))[0]
    pixels = np.asarray(image) / 255
    # Means of twelve, with weights that are rounded.
    bound = LEVEL + gamma(12 + 3)
    np.testing.assert_allclose(decoded, pixels.reshape(4, 3, 5, 4, 3).mean(axis=(1, 3)), rtol=bound)
    # Training data are resized by Pillow, which rounds to whole levels, by half of one along each axis.
    box = np.asarray(image.resize((5, 4), Image.Resampling.BOX), np.float32) / 255
    np.testing.assert_allclose(decoded, box, atol=1 / 255 + bound)


def test_no_images_decode_to_none():
    assert decode([], (5, 4, 3)).shape == (0, 5, 4, 3)


@pytest.mark.parametrize("file_format", ["GIF", "BMP", "TIFF"])
def test_other_formats_are_refused(file_format):
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be PNG or JPEG"):
        decode([encode(noise(5, 4), file_format)], (5, 4, 3))


@pytest.mark.parametrize("content", [b"", b"\x89", b"no image", b"\xff\xd8", b"\x00" * 100])
def test_garbage_is_refused(content):
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be PNG or JPEG"):
        decode([content], (5, 4, 3))


@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_images_cut_off_are_refused(file_format):
    content = encode(noise(50, 40), file_format)
    for length in (9, 20, 23, 24, 40, len(content) // 2):
        with pytest.raises(tf.errors.InvalidArgumentError):
            decode([content[:length]], (5, 4, 3))


@pytest.mark.parametrize(
    ("width", "height"), [(MAX_PIXELS + 1, 1), (5000, 5000), (0, 5), (1 << 31, 1 << 31), ((1 << 32) - 1, 1)]
)
def test_too_many_pixels_are_refused_before_they_are_decoded(width, height):
    with pytest.raises(tf.errors.InvalidArgumentError, match="without pixels or of more than 16777216"):
        decode([png_header(width, height)], (5, 4, 3))


def test_too_many_pixels_of_a_jpeg_are_refused():
    content = bytearray(encode(noise(16, 16), "JPEG"))
    start = content.index(b"\xff\xc0")
    content[start + 5 : start + 9] = struct.pack(">HH", 60000, 60000)
    with pytest.raises(tf.errors.InvalidArgumentError, match="without pixels or of more than 16777216"):
        decode([bytes(content)], (5, 4, 3))


@pytest.mark.parametrize(
    ("shape", "expected"), [((28, 28, 1), True), ((2, 2, 3), True), ((2, 2, 4), False), ((9,), False)]
)
def test_what_takes_images(shape, expected):
    assert takes_images(shape) == expected
