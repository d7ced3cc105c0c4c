"""Warm-up requests: stored with an export, replayed by a server before the version takes its first real request."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

from serving import layout
from tff_pdp.errors import ServingError

# TensorFlow Serving refuses to load a version with more.
MAX_RECORDS = 1000
BATCH_SIZES = (1, 8)


@dataclasses.dataclass(frozen=True)
class WarmupRequest:
    """One stored request: the signature it calls and its inputs by key."""

    signature_name: str
    inputs: dict[str, np.ndarray]


def write_requests(export_dir: Path, model_name: str, client_ids: Sequence[str], input_shape: tuple[int, ...]) -> None:
    """Writes warm-up requests for every signature and batch size, each mixing known and unknown clients.

    The examples are zeros: what warms a server up is the shape, and an export should carry no one's data.

    Args:
      export_dir: the SavedModel directory.
      model_name: the name under which the model will be served.
      client_ids: the clients of the export; may be empty.
      input_shape: shape of one example.
    """
    path = export_dir / layout.WARMUP_FILE
    with tf.io.TFRecordWriter(str(path)) as writer:
        for signature_name in layout.SIGNATURE_NAMES:
            for batch_size in BATCH_SIZES:
                ids = ["", *client_ids[: batch_size - 1]]
                ids += [""] * (batch_size - len(ids))
                request = predict_pb2.PredictRequest()
                request.model_spec.name = model_name
                request.model_spec.signature_name = signature_name
                request.inputs["client_id"].CopyFrom(tf.make_tensor_proto(ids, tf.string))
                request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.zeros((batch_size, *input_shape), np.float32)))
                log = prediction_log_pb2.PredictionLog(predict_log=prediction_log_pb2.PredictLog(request=request))
                writer.write(log.SerializeToString())


def read_requests(export_dir: Path) -> Iterator[WarmupRequest]:
    """Reads the warm-up requests of an export; none if it has no warm-up file.

    Raises:
      ServingError: if the file holds too many records or one that is not a predict request.
    """
    path = export_dir / layout.WARMUP_FILE
    if not path.exists():
        return
    for index, record in enumerate(tf.data.TFRecordDataset(str(path)).as_numpy_iterator()):
        if index >= MAX_RECORDS:
            raise ServingError(f"{path} holds more than {MAX_RECORDS} records.")
        log = prediction_log_pb2.PredictionLog.FromString(record)
        if log.WhichOneof("log_type") != "predict_log":
            raise ServingError(f"{path}: record {index} is not a predict request.")
        request = log.predict_log.request
        yield WarmupRequest(
            signature_name=request.model_spec.signature_name,
            inputs={key: tf.make_ndarray(value) for key, value in request.inputs.items()},
        )
