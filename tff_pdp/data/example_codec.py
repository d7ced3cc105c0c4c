"""Encodes and decodes many examples at once, as framed `tf.Example` records, in NumPy.

A record's bytes are those of `tf.train.Example(...).SerializeToString(deterministic=True)` with the features
`example_id` (32 hex characters), `x` and `y`. Fields of fixed size are at the same place in every record, so a record
is a template in which three ranges of bytes are filled in. Only the varint of an integer label varies in size, so each
possible size has a template of its own.

Layout of the messages: tensorflow/core/example/example.proto and protobuf.dev/programming-guides/encoding.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tff_pdp.data import tfrecord
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.errors import DataError

EXAMPLE_ID_SIZE = 32

# Fields of tf.train.Feature.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """A framed record in which three values and the payload's checksum are to be filled in.

    Attributes:
      template: the record, uint8 `[length]`.
      example_id: range of the bytes of the id.
      x: range of the bytes of the values.
      y: range of the bytes of the label.
      mask: uint8 `[length]`; a record has the template's bit wherever `mask` is set. Set are all bits outside of the
        three ranges and, in the bytes of a varint label, the highest bit, which says whether another byte follows.
    """

    template: np.ndarray
    example_id: slice
    x: slice
    y: slice
    mask: np.ndarray

    @property
    def length(self) -> int:
        """Number of bytes of the record, framing included."""
        return len(self.template)

    def fits(self, records: np.ndarray) -> bool:
        """Checks if all records, uint8 `[n, length]`, equal the template where `mask` is set; ignores the framing."""
        around = (
            slice(tfrecord.HEADER_SIZE, self.example_id.start),
            slice(self.example_id.stop, self.x.start),
            slice(self.x.stop, self.y.stop),
        )
        return not any(((records[:, part] ^ self.template[part]) & self.mask[part]).any() for part in around)


@functools.lru_cache(maxsize=64)
def record_layouts(features: FeatureSpec) -> tuple[RecordLayout, ...]:
    """Returns the layouts of records: one for each number of bytes that a label can take, in ascending order."""
    sizes = range(1, 11) if features.y_dtype == "int64" else (4,)
    return tuple(_layout(features, size) for size in sizes)


def _layout(features: FeatureSpec, label_size: int) -> RecordLayout:
    num_values = math.prod(features.shape)
    if features.x_dtype == "uint8":
        x_size, x_list = num_values, _field(_BYTES_LIST, _field(1, bytes(num_values)))
    else:
        # An empty packed list is left out.
        x_size, x_list = 4 * num_values, _field(_FLOAT_LIST, _field(1, bytes(4 * num_values)) if num_values else b"")
    y_list = _INT64_LIST if features.y_dtype == "int64" else _FLOAT_LIST
    id_entry = _map_entry(b"example_id", _field(_BYTES_LIST, _field(1, bytes(EXAMPLE_ID_SIZE))))
    x_entry = _map_entry(b"x", x_list)
    y_entry = _map_entry(b"y", _field(y_list, _field(1, bytes(label_size))))
    template = np.frombuffer(bytearray(tfrecord.frame(_field(1, id_entry + x_entry + y_entry))), np.uint8)
    # Each value is the end of its entry, and the entries are the end of the payload.
    y_stop = len(template) - tfrecord.FOOTER_SIZE
    x_stop = y_stop - len(y_entry)
    id_stop = x_stop - len(x_entry)
    example_id, x, y = (
        slice(stop - size, stop) for stop, size in ((id_stop, EXAMPLE_ID_SIZE), (x_stop, x_size), (y_stop, label_size))
    )
    mask = np.full(len(template), 255, np.uint8)
    mask[example_id] = mask[x] = mask[y] = 0
    if features.y_dtype == "int64":
        mask[y] = template[y.start : y.stop - 1] = 128
    return RecordLayout(template, example_id, x, y, mask)


def text_feature(name: str, value: str) -> bytes:
    """Encodes a `tf.train.Example` that has one feature of text; appended to another example, the feature is added."""
    return _field(1, _map_entry(name.encode(), _field(_BYTES_LIST, _field(1, value.encode()))))


def _map_entry(key: bytes, feature: bytes) -> bytes:
    return _field(1, _field(1, key) + _field(2, feature))


def _field(number: int, content: bytes) -> bytes:
    """Encodes a length-delimited field."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    high, low = divmod(value, 128)
    return bytes([low | 128]) + _varint(high) if high else bytes([low])


# Bytes of the parts in which examples are encoded and decoded; in larger parts, every step would read memory again.
_PART_BYTES = 2**19

# The smallest labels whose varints have 2, 3, ... and 10 bytes.
_VARINT_BOUNDS = np.array([1 << (7 * size) for size in range(1, 10)], np.uint64)


def encode_examples(features: FeatureSpec, x: np.ndarray, y: np.ndarray, example_ids: np.ndarray) -> bytes:
    """Encodes examples as TFRecords, one after another in their order.

    Args:
      features: shape and types of an example; `d` is the number of values of an example.
      x: float32 `[n, d]`, or uint8 `[n, d]` where `features.x_dtype` is `uint8`.
      y: int64 `[n]`, or float32 `[n]` for a regression.
      example_ids: dtype `S32` `[n]`, 32 hex characters each.

    Raises:
      ValueError: an array has another shape or dtype.
    """
    x, y, ids = _checked(features, x, y, example_ids)
    return b"".join(_encode_part(features, x[part], y[part], ids[part]) for part in _parts(features, len(y)))


def record_lengths(features: FeatureSpec, y: np.ndarray) -> np.ndarray:
    """Returns the number of bytes of each example's record, framing included, int64 `[n]`, from labels `y` `[n]`."""
    by_label_size = np.array([layout.length for layout in record_layouts(features)], np.int64)
    if features.y_dtype != "int64":
        return np.full(len(y), by_label_size[0])
    return by_label_size[np.searchsorted(_VARINT_BOUNDS, np.asarray(y, np.int64).view(np.uint64), side="right")]


def decode_examples(
    features: FeatureSpec, buffer: bytes, file_name: str, offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Decodes records that `encode_examples` wrote, checking every checksum.

    Args:
      features: shape and types of an example.
      buffer: the bytes of `n` whole records.
      file_name: source of the buffer, for error messages.
      offset: position of the buffer in that file, for error messages.

    Returns:
      Pair `(x, y)`. `x` is float32 `[n, *shape]`; stored bytes have been divided by 255. `y` is int64 `[n]` or, for a
      regression, float32 `[n]`.

    Raises:
      DataError: a record is cut short, fails its checksum, or has another layout; the message names the file and the
        record's offset.
    """
    starts, lengths = record_extents(features, buffer, file_name, offset)
    x = np.empty((len(starts), math.prod(features.shape)), np.float32)
    y = np.empty(len(starts), features.y_dtype)
    for part in _parts(features, len(starts)):
        if not _decode_part(features, buffer, starts[part], lengths[part], x[part], y[part]):
            raise _error(features, buffer, file_name, offset)
    return x.reshape(len(y), *features.shape), y


def decode_example_ids(features: FeatureSpec, buffer: bytes, file_name: str, offset: int = 0) -> np.ndarray:
    """Decodes the ids of records, `S32` `[n]`; checks only headers. Args and errors are as in `decode_examples`."""
    starts, lengths = record_extents(features, buffer, file_name, offset)
    ids = np.zeros((len(starts), EXAMPLE_ID_SIZE), np.uint8)
    content = np.frombuffer(buffer, np.uint8)
    for layout, members, rows in _groups(features, starts, lengths) if len(starts) else ():
        ids[members] = _windows(content, layout.length)[rows, layout.example_id]
    return ids.view(f"S{EXAMPLE_ID_SIZE}").reshape(-1)


def record_extents(
    features: FeatureSpec, buffer: bytes, file_name: str, offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the first bytes and the lengths of a buffer's records, each int64 `[n]`; checks only headers.

    Arguments and errors are as in `decode_examples`.
    """
    lengths_by_header = _lengths_by_header(features)
    length = lengths_by_header.get(buffer[: tfrecord.HEADER_SIZE], 0)
    if length and len(buffer) % length == 0:
        headers = np.frombuffer(buffer, np.uint8).reshape(-1, length)[:, : tfrecord.HEADER_SIZE]
        if (headers == headers[0]).all():
            return np.arange(0, len(buffer), length), np.full(len(headers), length)
    starts = []
    position = 0
    while position < len(buffer):
        length = lengths_by_header.get(buffer[position : position + tfrecord.HEADER_SIZE])
        if length is None or position + length > len(buffer):
            raise _error(features, buffer, file_name, offset)
        starts.append(position)
        position += length
    starts = np.array(starts, np.int64)
    return starts, np.diff(starts, append=len(buffer))


def _parts(features: FeatureSpec, num_examples: int) -> Iterator[slice]:
    """Yields ranges of examples whose records stay in the processor's cache from the first step to the last."""
    size = max(1, _PART_BYTES // record_layouts(features)[0].length)
    return (slice(start, start + size) for start in range(0, num_examples, size))


def _encode_part(features: FeatureSpec, x: np.ndarray, y: np.ndarray, ids: np.ndarray) -> bytes:
    """Encodes records of one or more examples, whose `x` and ids are given as bytes: uint8 `[n, size]`."""
    lengths = record_lengths(features, y)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    records = np.empty(stops[-1], np.uint8)
    for layout, members, rows in _groups(features, starts, lengths):
        windows = _windows(records, layout.length)
        windows[rows] = layout.template
        windows[rows, layout.example_id] = ids[members]
        windows[rows, layout.x] = x[members]
        windows[rows, layout.y] = _label_bytes(y[members], layout)
    checksums = tfrecord.payload_checksums(records.tobytes(), starts, stops)
    _windows(records, tfrecord.FOOTER_SIZE)[stops - tfrecord.FOOTER_SIZE] = checksums[:, np.newaxis].view(np.uint8)
    return records.tobytes()


def _decode_part(
    features: FeatureSpec, buffer: bytes, starts: np.ndarray, lengths: np.ndarray, x: np.ndarray, y: np.ndarray
) -> bool:
    """Fills in `x` `[n, d]` and `y` `[n]` from one or more records; tells whether these are intact, and ours."""
    content = np.frombuffer(buffer, np.uint8)
    checksums = tfrecord.payload_checksums(buffer, starts, starts + lengths)
    intact = True
    for layout, members, rows in _groups(features, starts, lengths):
        records = _windows(content, layout.length)[rows]
        stored = np.ascontiguousarray(records[:, layout.y.stop :]).view(np.uint32)
        intact = intact and np.array_equal(stored.ravel(), checksums[members]) and layout.fits(records)
        values = np.ascontiguousarray(records[:, layout.x]).view(features.x_dtype)
        x[members] = values if values.dtype == np.float32 else np.divide(values, np.float32(255), dtype=np.float32)
        y[members] = _labels(records[:, layout.y], y.dtype)
    return intact


def _checked(
    features: FeatureSpec, x: np.ndarray, y: np.ndarray, example_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Checks the three arrays; returns `x` and the ids as bytes, uint8 `[n, size]`, and the labels."""
    expected = {
        "x": (x, (len(y), math.prod(features.shape)), features.x_dtype),
        "y": (y, (len(y),), features.y_dtype),
        "example_ids": (example_ids, (len(y),), f"S{EXAMPLE_ID_SIZE}"),
    }
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != np.dtype(dtype):
            raise ValueError(f"{name} must be {dtype} {list(shape)}, not {array.dtype} {list(array.shape)}")
    x_bytes = np.ascontiguousarray(x).view(np.uint8).reshape(len(y), x.itemsize * x.shape[1])
    ids = np.ascontiguousarray(example_ids).view(np.uint8).reshape(len(y), EXAMPLE_ID_SIZE)
    return x_bytes, np.ascontiguousarray(y), ids


def _error(features: FeatureSpec, buffer: bytes, file_name: str, offset: int) -> DataError:
    """Describes a bad buffer by its first corrupt record or, where there is none, the first of another layout."""
    position = 0
    for payload in tfrecord.unframe(buffer, file_name, offset):
        record = np.frombuffer(tfrecord.frame(payload), np.uint8)
        layouts = (layout for layout in record_layouts(features) if layout.length == len(record))
        if not any(layout.fits(record[np.newaxis]) for layout in layouts):
            break
        position += len(record)
    return DataError(
        f"{file_name}: the record at byte {offset + position} is not laid out as an example of shape {features.shape} "
        f"with {features.x_dtype} values and an {features.y_dtype} label; prepare the data again"
    )


@functools.lru_cache(maxsize=64)
def _lengths_by_header(features: FeatureSpec) -> dict[bytes, int]:
    """Returns a record's length by its header, which has the length and its checksum."""
    return {layout.template[: tfrecord.HEADER_SIZE].tobytes(): layout.length for layout in record_layouts(features)}


def _groups(features: FeatureSpec, starts: np.ndarray, lengths: np.ndarray) -> list[tuple[RecordLayout, Any, Any]]:
    """Returns the layouts that occur, with an index of their records among all, and of these records' first bytes."""
    if (lengths == lengths[0]).all():
        # Slices instead of arrays of numbers: views instead of copies.
        layout = next(layout for layout in record_layouts(features) if layout.length == lengths[0])
        return [(layout, slice(None), slice(starts[0], starts[-1] + 1, layout.length))]
    members = [np.flatnonzero(lengths == layout.length) for layout in record_layouts(features)]
    return [
        (layout, chosen, starts[chosen])
        for layout, chosen in zip(record_layouts(features), members, strict=True)
        if len(chosen)
    ]


def _windows(content: np.ndarray, length: int) -> np.ndarray:
    """Returns the ranges of `length` bytes that start at each byte, as a view; faster than `sliding_window_view`."""
    return np.ndarray((len(content) - length + 1, length), np.uint8, content, strides=(1, 1))  # pyright: ignore


def _label_bytes(y: np.ndarray, layout: RecordLayout) -> np.ndarray:
    """Encodes labels as they are stored: uint8 `[n, size of a label]`."""
    if y.dtype == np.float32:
        return y[:, np.newaxis].view(np.uint8)
    size = layout.y.stop - layout.y.start
    digits = (y.view(np.uint64)[:, np.newaxis] >> _shifts(size)).astype(np.uint8)
    digits[:, :-1] |= 128
    digits[:, -1] &= 127
    return digits


def _labels(stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Decodes the bytes of `_label_bytes`."""
    if dtype == np.float32:
        return np.ascontiguousarray(stored).view(np.float32).ravel()
    digits = (stored & 127).astype(np.uint64) << _shifts(stored.shape[1])
    return np.bitwise_or.reduce(digits, axis=1).view(np.int64)


def _shifts(size: int) -> np.ndarray:
    return np.arange(0, 7 * size, 7, dtype=np.uint64)
