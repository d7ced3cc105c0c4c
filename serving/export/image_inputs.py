"""Images as requests send them, decoded in the graph: PNG or JPEG bytes become what the model was trained on."""

import tensorflow as tf

# A photograph of 16 megapixels takes 50 MB while it is decoded.
MAX_PIXELS = 1 << 24
CHANNELS = (1, 3)

_PNG_PREFIX = b"\x89PNG\r\n\x1a\n"
_JPEG_PREFIX = b"\xff\xd8\xff"
# Prefix, length and type of the first chunk, then width and height, four bytes each (PNG specification, 11.2.2).
_PNG_SIZE_AT, _PNG_SIZE_BYTES = 16, 8
# Red, green and blue in grey, of 2^16 (ITU-R 601-2), as Pillow converts to "L". TensorFlow's own conversion of a PNG
# mixes up green and blue.
_GREY_WEIGHTS = (19595, 38470, 7471)


def takes_images(input_shape: tuple[int, ...]) -> bool:
    """Whether examples are images: `[height, width, 1]` in grey or `[height, width, 3]` in colour."""
    return len(input_shape) == 3 and input_shape[2] in CHANNELS


def decode_images(image_bytes: tf.Tensor, input_shape: tuple[int, ...]) -> tf.Tensor:
    """Decodes PNG and JPEG images, which may be mixed, for a model that `takes_images`.

    They become grey or of three channels, as the model needs; transparency is dropped. Pixels are divided by 255;
    images of other sizes are resized by averaging areas, whatever their proportions.

    Args:
      image_bytes: string `[n]`.
      input_shape: height, width and channels of one example.

    Returns:
      float32 `[n, *input_shape]`, in `[0, 1]`. Running it fails with INVALID_ARGUMENT for anything but PNG and JPEG,
      and for more than `MAX_PIXELS` pixels, which are counted before they are decoded.
    """
    height, width, channels = input_shape

    def decode_one(content: tf.Tensor) -> tf.Tensor:
        is_png = _starts_with(content, _PNG_PREFIX)
        is_known = tf.debugging.Assert(
            tf.logical_or(is_png, _starts_with(content, _JPEG_PREFIX)), ["image_bytes must be PNG or JPEG images"]
        )
        with tf.control_dependencies([is_known]):
            pixels = tf.cond(is_png, lambda: _decode_png(content, channels), lambda: _decode_jpeg(content, channels))
        return tf.image.resize(pixels, [height, width], tf.image.ResizeMethod.AREA) / 255.0

    decoded = tf.map_fn(
        decode_one, image_bytes, fn_output_signature=tf.TensorSpec(input_shape, tf.float32), parallel_iterations=1
    )
    # Of no images, `map_fn` gives no shape.
    return tf.ensure_shape(decoded, [None, *input_shape])


def _decode_png(content: tf.Tensor, channels: int) -> tf.Tensor:
    is_long = tf.debugging.assert_greater_equal(
        tf.strings.length(content), _PNG_SIZE_AT + _PNG_SIZE_BYTES, message="image_bytes holds a PNG that is cut off"
    )
    with tf.control_dependencies([is_long]):
        size = tf.strings.substr(content, _PNG_SIZE_AT, _PNG_SIZE_BYTES)
    # As signed numbers: a width over 2^31 would be negative, and is refused.
    checked = _check_size(tf.io.decode_raw(size, tf.int32, little_endian=False))
    with tf.control_dependencies([checked]):
        pixels = tf.io.decode_png(content, channels=3)
    if channels == 3:
        return tf.cast(pixels, tf.float32)
    weighted = tf.reduce_sum(tf.cast(pixels, tf.int32) * _GREY_WEIGHTS, axis=-1, keepdims=True)
    return tf.cast((weighted + (1 << 15)) // (1 << 16), tf.float32)


def _decode_jpeg(content: tf.Tensor, channels: int) -> tf.Tensor:
    checked = _check_size(tf.io.extract_jpeg_shape(content)[:2])
    with tf.control_dependencies([checked]):
        return tf.cast(tf.io.decode_jpeg(content, channels=channels, dct_method="INTEGER_ACCURATE"), tf.float32)


def _check_size(size: tf.Tensor) -> tf.Operation:
    sizes = tf.cast(size, tf.int64)
    # One side at a time first, for the product of two may overflow.
    is_small = tf.reduce_all((sizes > 0) & (sizes <= MAX_PIXELS)) & (tf.reduce_prod(sizes) <= MAX_PIXELS)
    return tf.debugging.Assert(is_small, [f"image_bytes holds an image without pixels or of more than {MAX_PIXELS}"])


def _starts_with(content: tf.Tensor, prefix: bytes) -> tf.Tensor:
    return tf.equal(tf.strings.substr(content, 0, len(prefix)), prefix)
