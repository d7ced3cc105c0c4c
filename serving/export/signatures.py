"""Builds the signatures of an export, which pass the inputs of TensorFlow Serving's APIs to the served module.

Images in requests are PNG or JPEG bytes; the graph decodes images to examples like the training examples.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from serving.export.served_module import ServedModule, answers_of
from serving.saved_model import layout
from serving.saved_model.signatures import describe
from tff_pdp.models.base import Model

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

_METHOD_NAMES = {
    layout.CLASSIFY: tf.saved_model.CLASSIFY_METHOD_NAME,
    layout.REGRESS: tf.saved_model.REGRESS_METHOD_NAME,
}


def signature_names(model: Model) -> tuple[str, ...]:
    """Returns the names of all signatures in an export of `model`."""
    images = (layout.IMAGES_SIGNATURE,) if takes_images(model.input_shape) else ()
    return (*layout.PREDICT_SIGNATURES, *images, examples_signature(model))


def examples_signature(model: Model) -> str:
    """Returns the name of the signature that takes serialised `tf.Example` messages: `classify` or `regress`."""
    return layout.CLASSIFY if model.num_classes else layout.REGRESS


def build_signatures(module: ServedModule, model: Model) -> dict[str, Any]:
    """Traces a function for each signature, and returns the traced functions by signature name.

    All these functions call one common function, so that the graph has the model only once. The first dimension
    of inputs and outputs has any size, as TensorFlow Serving needs for batches and for JSON rows.
    """
    client_id = tf.TensorSpec([None], tf.string, name="client_id")
    x = tf.TensorSpec([None, *model.input_shape], tf.float32, name="x")
    serve = tf.function(module.serve, input_signature=[client_id, x], autograph=False)
    traced = serve.get_concrete_function()
    signatures: dict[str, Any] = dict.fromkeys(map(str, layout.PREDICT_SIGNATURES), traced)
    if takes_images(model.input_shape):
        image_bytes = tf.TensorSpec([None], tf.string, name="image_bytes")

        @tf.function(input_signature=[client_id, image_bytes], autograph=False)
        def predict_images(client_id: tf.Tensor, image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
            return serve(client_id, decode_images(image_bytes, model.input_shape))

        signatures[layout.IMAGES_SIGNATURE] = predict_images.get_concrete_function()
    signatures[examples_signature(model)] = _examples_signature(serve, model, module.labels).get_concrete_function(
        tf.TensorSpec([None], tf.string, name=tf.saved_model.CLASSIFY_INPUTS)
    )
    return signatures


def _examples_signature(serve: Callable[..., dict[str, tf.Tensor]], model: Model, class_labels: Sequence[str]):
    features = {
        "client_id": tf.io.FixedLenFeature([], tf.string, default_value=""),
        "x": tf.io.FixedLenFeature(model.input_shape, tf.float32),
    }
    name, _ = answers_of(model)

    def answers_to(examples: tf.Tensor) -> tf.Tensor:
        parsed = tf.io.parse_example(examples, features)
        return serve(parsed["client_id"], parsed["x"])[name]

    @tf.function(autograph=False)
    def classify(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        labels = tf.constant([list(class_labels)])
        return {
            tf.saved_model.CLASSIFY_OUTPUT_CLASSES: tf.tile(labels, tf.stack([tf.shape(examples)[0], 1])),
            tf.saved_model.CLASSIFY_OUTPUT_SCORES: answers_to(examples),
        }

    @tf.function(autograph=False)
    def regress(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return {tf.saved_model.REGRESS_OUTPUTS: answers_to(examples)}

    return classify if model.num_classes else regress


def finish_signatures(export_dir: Path) -> dict[str, Any]:
    """Corrects the method names of `classify` and `regress`, for which `tf.saved_model.save` writes predict's name.

    Returns:
      Descriptions of the signatures, in the form of `serving.saved_model.signatures.describe`, by name.
    """
    path = export_dir / layout.SAVED_MODEL_FILE
    saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    (meta_graph,) = saved_model.meta_graphs
    definitions = {name: meta_graph.signature_def[name] for name in sorted(meta_graph.signature_def)}
    for name, definition in definitions.items():
        definition.method_name = _METHOD_NAMES.get(name, definition.method_name)
    path.write_bytes(saved_model.SerializeToString(deterministic=True))
    return {name: describe(definition) for name, definition in definitions.items() if definition.inputs}


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
    """Returns whether the shape is that of images, `[height, width, 1]` (grey) or `[height, width, 3]` (colour)."""
    return len(input_shape) == 3 and input_shape[2] in CHANNELS


def decode_images(image_bytes: tf.Tensor, input_shape: tuple[int, ...]) -> tf.Tensor:
    """Decodes PNG and JPEG images to examples for a model with image inputs.

    A batch may contain images of both formats. Images are converted to grey or to colour, as the model needs;
    transparency is ignored. Pixels are divided by 255. Images of another size are resized by averaging areas, which
    does not keep the images' proportions.

    Args:
      image_bytes: encoded images, string `[n]`.
      input_shape: height, width and channels of one example.

    Returns:
      Examples, float32 `[n, *input_shape]`, in `[0, 1]`. The graph fails with INVALID_ARGUMENT if bytes are neither PNG
      nor JPEG, or if an image has no pixels or, by its header, more than `MAX_PIXELS` pixels.
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
    # For zero images, `map_fn` gives no shape.
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
