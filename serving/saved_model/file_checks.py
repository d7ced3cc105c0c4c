"""Checks on the files of an export: nothing but the files that a server expects, and warm-up requests it can read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import prediction_log_pb2

from serving.saved_model import layout
from serving.saved_model.warmup import MAX_RECORDS
from tff_pdp.data.tfrecord import unframe
from tff_pdp.errors import DataError, ServingError

MAX_WARMUP_BYTES = 64 << 20
MAX_WARMUP_ELEMENTS = 1 << 24

# A loader that finds the same graph under another name, or settings of a server, would use them instead.
_TOP_LEVEL = frozenset({layout.SAVED_MODEL_FILE, "fingerprint.pb", "variables", "assets", "assets.extra"})
_SERVER_SETTINGS = f"{layout.EXTRA_DIRECTORY}/saved_model_config.pbtxt"


def check_files(export_dir: Path) -> None:
    """Refuses links, special files and files that loaders read instead of those that are checked.

    Raises:
      ServingError: naming the first one.
    """
    if not export_dir.is_dir():
        raise ServingError(f"{export_dir} is not a directory.")
    for path in (export_dir, *export_dir.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ServingError(f"{path} is a link or a special file; an export may hold plain files only.")
        if (path.parent == export_dir and path.name not in _TOP_LEVEL) or path == export_dir / _SERVER_SETTINGS:
            raise ServingError(f"{path} is no part of an export; remove it.")


def check_documents(export_dir: Path) -> None:
    """Refuses a model card, a privacy report or another document beside them that is not JSON.

    Raises:
      ServingError: naming the file.
    """
    for path in sorted((export_dir / layout.EXTRA_DIRECTORY).glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ServingError(f"{path} is not JSON: {error}.") from error


def check_warmup(export_dir: Path) -> None:
    """Refuses warm-up requests that TensorFlow Serving would not load, or that would take much memory.

    Raises:
      ServingError: naming the file and the record.
    """
    path = export_dir / layout.WARMUP_FILE
    if not path.exists():
        return
    if path.stat().st_size > MAX_WARMUP_BYTES:
        raise ServingError(f"{path} has more than {MAX_WARMUP_BYTES} bytes; store fewer warm-up requests.")
    try:
        records = unframe(path.read_bytes(), str(path))
    except DataError as error:
        raise ServingError(f"{path} is damaged: {error}.") from error
    if len(records) > MAX_RECORDS:
        raise ServingError(f"{path} holds {len(records)} records; servers take at most {MAX_RECORDS}.")
    for number, record in enumerate(records):
        try:
            log = prediction_log_pb2.PredictionLog.FromString(record)
        except DecodeError as error:
            raise ServingError(f"{path}: record {number} is not a PredictionLog: {error}.") from error
        kind = log.WhichOneof("log_type")
        if kind not in ("predict_log", "classify_log", "regress_log"):
            raise ServingError(f"{path}: record {number} is {kind or 'empty'}, not a predict, classify or regress log.")
        if kind == "predict_log":
            _check_sizes(f"{path}: record {number}", log.predict_log.request.inputs)


def _check_sizes(what: str, inputs: Mapping[str, tensor_pb2.TensorProto]) -> None:
    for key, tensor in inputs.items():
        # One value stands for all of them, so a few bytes may unfold to any size.
        sizes = [dimension.size for dimension in tensor.tensor_shape.dim]
        if min(sizes, default=0) < 0 or math.prod(sizes) > MAX_WARMUP_ELEMENTS:
            raise ServingError(f"{what} has an input {key!r} of shape {sizes[:8]}; store smaller requests.")
