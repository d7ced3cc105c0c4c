"""The warm-up file of an export, read record by record: what a server would not load, or not for long, is refused."""

import math
from collections.abc import Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import prediction_log_pb2

from serving.saved_model import layout
from tff_pdp.data.tfrecord import unframe
from tff_pdp.errors import DataError, ServingError

# TensorFlow Serving refuses to load a version with more.
MAX_RECORDS = 1000
MAX_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 24


def read_logs(export_dir: Path) -> list[prediction_log_pb2.PredictionLog]:
    """Reads the warm-up requests of an export; none if it has no warm-up file.

    Returns:
      Logs that are each of a predict, classify or regress request.

    Raises:
      ServingError: naming the file and the record, if TensorFlow Serving would not load the file, or it would take much
        memory.
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
    if kind not in ("predict_log", "classify_log", "regress_log"):
        raise ServingError(f"{what} is {kind or 'empty'}, not a predict, classify or regress log.")
    _check_sizes(what, log.predict_log.request.inputs)
    return log


def _check_sizes(what: str, inputs: Mapping[str, tensor_pb2.TensorProto]) -> None:
    for key, tensor in inputs.items():
        # One value stands for all of them, so a few bytes may unfold to any size.
        sizes = [dimension.size for dimension in tensor.tensor_shape.dim]
        if min(sizes, default=0) < 0 or math.prod(sizes) > MAX_ELEMENTS:
            raise ServingError(f"{what} has an input {key!r} of shape {sizes[:8]}; store smaller requests.")
