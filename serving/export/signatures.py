"""What can be called: one function over the served module, in the forms that TensorFlow Serving's APIs take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from serving.export.image_inputs import decode_images, takes_images
from serving.export.served_module import ServedModule, answers_of
from serving.saved_model import layout
from tff_pdp.models.base import Model

_METHOD_NAMES = {
    layout.CLASSIFY_SIGNATURE: tf.saved_model.CLASSIFY_METHOD_NAME,
    layout.REGRESS_SIGNATURE: tf.saved_model.REGRESS_METHOD_NAME,
}


def signature_names(model: Model) -> tuple[str, ...]:
    """The signatures of an export of this model."""
    images = (layout.IMAGES_SIGNATURE,) if takes_images(model.input_shape) else ()
    return (*layout.PREDICT_SIGNATURES, *images, examples_signature(model))


def examples_signature(model: Model) -> str:
    """The signature that takes serialised `tf.Example` messages: it classifies or regresses."""
    return layout.CLASSIFY_SIGNATURE if model.num_classes else layout.REGRESS_SIGNATURE


def build_signatures(module: ServedModule, model: Model) -> dict[str, Any]:
    """Traces every signature; all call one function, so that the graph holds the model once.

    The first dimension of each input and output is open: TensorFlow Serving needs that for row JSON and for batching.
    """
    client_id = tf.TensorSpec([None], tf.string, name="client_id")
    x = tf.TensorSpec([None, *model.input_shape], tf.float32, name="x")
    serve = tf.function(module.serve, input_signature=[client_id, x], autograph=False)
    traced = serve.get_concrete_function()
    signatures: dict[str, Any] = dict.fromkeys(map(str, layout.PREDICT_SIGNATURES), traced)
    if takes_images(model.input_shape):
        signatures[layout.IMAGES_SIGNATURE] = _images_signature(serve, model).get_concrete_function(
            client_id, tf.TensorSpec([None], tf.string, name="image_bytes")
        )
    signatures[examples_signature(model)] = _examples_signature(serve, model).get_concrete_function(
        tf.TensorSpec([None], tf.string, name=tf.saved_model.CLASSIFY_INPUTS)
    )
    return signatures


def _images_signature(serve: Callable[..., dict[str, tf.Tensor]], model: Model):
    @tf.function(autograph=False)
    def predict_images(client_id: tf.Tensor, image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        return serve(client_id, decode_images(image_bytes, model.input_shape))

    return predict_images


def _examples_signature(serve: Callable[..., dict[str, tf.Tensor]], model: Model):
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
        labels = tf.constant([[str(label) for label in range(model.num_classes)]])
        return {
            tf.saved_model.CLASSIFY_OUTPUT_CLASSES: tf.tile(labels, tf.stack([tf.shape(examples)[0], 1])),
            tf.saved_model.CLASSIFY_OUTPUT_SCORES: answers_to(examples),
        }

    @tf.function(autograph=False)
    def regress(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return {tf.saved_model.REGRESS_OUTPUTS: answers_to(examples)}

    return classify if model.num_classes else regress


def finish_signatures(export_dir: Path) -> dict[str, Any]:
    """Writes the method names of `classify` and `regress`, which `tf.saved_model.save` leaves at `predict`.

    Returns:
      What each signature takes and gives, as JSON values.
    """
    path = export_dir / layout.SAVED_MODEL_FILE
    saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    (meta_graph,) = saved_model.meta_graphs
    definitions = {name: meta_graph.signature_def[name] for name in sorted(meta_graph.signature_def)}
    for name, definition in definitions.items():
        definition.method_name = _METHOD_NAMES.get(name, definition.method_name)
    path.write_bytes(saved_model.SerializeToString(deterministic=True))
    return {name: _described(definition) for name, definition in definitions.items() if definition.inputs}


def _described(definition: meta_graph_pb2.SignatureDef) -> dict[str, Any]:
    return {
        "method": definition.method_name,
        "inputs": {key: _described_tensor(info) for key, info in definition.inputs.items()},
        "outputs": {key: _described_tensor(info) for key, info in definition.outputs.items()},
    }


def _described_tensor(info: meta_graph_pb2.TensorInfo) -> dict[str, Any]:
    sizes = [dimension.size for dimension in info.tensor_shape.dim]
    return {"dtype": tf.as_dtype(info.dtype).name, "shape": [None if size < 0 else size for size in sizes]}
