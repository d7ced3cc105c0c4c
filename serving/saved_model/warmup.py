"""Writes and reads an export's warm-up requests, which a server runs before a version gets its first real request.

A file of warm-up requests is refused if a server could not load the file, or would need much memory to load it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow_serving.apis import input_pb2, prediction_log_pb2

from serving.saved_model import layout
from tff_pdp.data.tfrecord import unframe
from tff_pdp.errors import DataError, ServingError

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false


# TensorFlow Serving does not load a version with more.
MAX_RECORDS = 1000
MAX_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 24


def read_logs(export_dir: Path) -> list[prediction_log_pb2.PredictionLog]:
    """Returns the logs of requests in an export's warm-up file, or an empty list if the export has no such file.

    Each log has one predict, classify or regress request.

    Raises:
      ServingError: TensorFlow Serving could not load the file, or a limit on its size is exceeded; the message names
        the file and the record.
    """
    path = export_dir / layout.WARMUP_FILE
    if not path.exists():
        return []
    if path.stat().st_size > MAX_BYTES:
        raise ServingError(f"{path} has more than {MAX_BYTES} bytes; store fewer warm-up requests.")
    try:
        records = unframe(path.read_bytes(), str(path))
    except DataError as error:
        raise ServingError(f"{path} is damaged: {error}.") from error
    if len(records) > MAX_RECORDS:
        raise ServingError(f"{path} holds {len(records)} records; servers take at most {MAX_RECORDS}.")
    return [_read_log(f"{path}: record {number}", record) for number, record in enumerate(records)]


def _read_log(what: str, record: bytes) -> prediction_log_pb2.PredictionLog:
    try:
        log = prediction_log_pb2.PredictionLog.FromString(record)
    except DecodeError as error:
        raise ServingError(f"{what} is not a PredictionLog: {error}.") from error
    kind = log.WhichOneof("log_type")
    if kind not in [f"{method}_log" for method in (layout.PREDICT, layout.CLASSIFY, layout.REGRESS)]:
        raise ServingError(f"{what} is {kind or 'empty'}, not a predict, classify or regress log.")
    for key, tensor in log.predict_log.request.inputs.items():
        # One value may stand for all elements, so a few bytes may grow to any size.
        sizes = [dimension.size for dimension in tensor.tensor_shape.dim]
        if min(sizes, default=0) < 0 or math.prod(sizes) > MAX_ELEMENTS:
            raise ServingError(f"{what} has an input {key!r} of shape {sizes[:8]}; store smaller requests.")
    return log


BATCH_SIZES = (1, 8)


@dataclasses.dataclass(frozen=True)
class WarmupRequest:
    """One warm-up request.

    Attributes:
      method: `predict`, `classify` or `regress`.
      signature_name: name of the signature.
      inputs: arrays by key. For `classify` and `regress`, `inputs` is the only key, and its array has serialised
        `tf.Example`s, bytes `[n]`.
    """

    method: str
    signature_name: str
    inputs: Mapping[str, np.ndarray]


def write_requests(
    export_dir: Path, model_name: str, signatures: Sequence[str], client_ids: Sequence[str], input_shape: tuple
) -> None:
    """Writes a warm-up request for each signature (named in `signatures`) and each batch size in `BATCH_SIZES`.

    Requests have the empty id and ids from `client_ids`. Examples are zeros of the shape `input_shape`, and images are
    black: only shapes matter for a warm-up, and no client's data should be in an export.
    """
    with tf.io.TFRecordWriter(str(export_dir / layout.WARMUP_FILE)) as writer:
        for signature_name in signatures:
            for batch_size in BATCH_SIZES:
                # The unknown client and some known ones, repeated to fill the batch.
                ids = np.resize(np.array(["", *client_ids[: batch_size - 1]], object), batch_size)
                writer.write(_log(model_name, signature_name, ids, input_shape).SerializeToString())


def read_requests(export_dir: Path) -> Iterator[WarmupRequest]:
    """Yields the warm-up requests of an export; none if there is no warm-up file.

    Raises:
      ServingError: the file is refused; see `read_logs`.
    """
    for log in read_logs(export_dir):
        kind = log.WhichOneof("log_type")
        request, method = getattr(log, kind).request, kind.removesuffix("_log")
        if method == layout.PREDICT:
            inputs = {key: tf.make_ndarray(value) for key, value in request.inputs.items()}
        else:
            context, examples = read_examples(request.input)
            # Concatenated messages are merged when they are parsed; where both have a feature, the later one counts.
            serialised = np.array([*(context + one for one in examples), None], object)[:-1]
            inputs = {tf.saved_model.CLASSIFY_INPUTS: serialised}
        yield WarmupRequest(method, request.model_spec.signature_name, inputs)


def example(client_id: str, x: np.ndarray) -> tf.train.Example:
    """Builds an example for the signatures `classify` and `regress`, with the features `client_id` and `x`."""
    features = {
        "client_id": tf.train.Feature(bytes_list=tf.train.BytesList(value=[client_id.encode()])),
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=x.ravel())),
    }
    return tf.train.Example(features=tf.train.Features(feature=features))


def _log(
    model_name: str, signature_name: str, client_ids: np.ndarray, input_shape: tuple
) -> prediction_log_pb2.PredictionLog:
    log = prediction_log_pb2.PredictionLog()
    is_of_examples = signature_name in (layout.CLASSIFY, layout.REGRESS)
    request = getattr(log, f"{signature_name if is_of_examples else layout.PREDICT}_log").request
    request.model_spec.name = model_name
    request.model_spec.signature_name = signature_name
    if is_of_examples:
        zeros = np.zeros(input_shape, np.float32)
        request.input.example_list.examples.extend(example(client_id, zeros) for client_id in client_ids)
        return log
    request.inputs["client_id"].CopyFrom(tf.make_tensor_proto(client_ids, tf.string))
    if signature_name == layout.IMAGES_SIGNATURE:
        black = tf.zeros(input_shape, tf.uint8)
        images = np.array([tf.io.encode_png(black).numpy(), tf.io.encode_jpeg(black).numpy()], object)
        request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto(np.resize(images, len(client_ids)), tf.string))
    else:
        zeros = np.zeros((len(client_ids), *input_shape), np.float32)
        request.inputs["x"].CopyFrom(tf.make_tensor_proto(zeros))
    return log


def read_examples(message: input_pb2.Input) -> tuple[bytes, list[bytes]]:
    """Returns a request's context (features that all examples share, or empty) and its examples, all serialised."""
    if message.WhichOneof("kind") != "example_list_with_context":
        return b"", [one.SerializeToString() for one in message.example_list.examples]
    listed = message.example_list_with_context
    return listed.context.SerializeToString(), [one.SerializeToString() for one in listed.examples]
