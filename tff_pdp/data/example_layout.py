"""Where the parts of a framed `tf.Example` record lie, for the examples of a client dataset.

A record's bytes are those of `tf.train.Example(...).SerializeToString(deterministic=True)` with the features
`example_id` (32 hex characters), `x` and `y`. Fields of one size stand at one place in every record, so a record is a
template in which three ranges of bytes are filled in. Only the varint of an integer label changes its size: there is a
template for each size it can have.

Layout of the messages: tensorflow/core/example/example.proto and protobuf.dev/programming-guides/encoding.
"""

import dataclasses
import functools
import math

import numpy as np

from tff_pdp.data import tfrecord
from tff_pdp.data.manifest import FeatureSpec

EXAMPLE_ID_SIZE = 32

# Fields of tf.train.Feature.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """A framed record in which three values and the payload's checksum are to be filled in.

    Attributes:
      template: the record, uint8 `[length]`.
      example_id: where the id lies in it.
      x: where the values lie.
      y: where the label lies.
      mask: uint8 `[length]`, which bits of the template are in every record: those of all bytes around the values and,
        in the bytes of a varint, the highest bit, which says whether another byte follows.
    """

    template: np.ndarray
    example_id: slice
    x: slice
    y: slice
    mask: np.ndarray

    @property
    def length(self) -> int:
        """Bytes of the record, framing included."""
        return len(self.template)

    def fits(self, records: np.ndarray) -> bool:
        """Whether what lies around the values of `records`, uint8 `[n, length]`, is the template's; headers aside."""
        around = (
            slice(tfrecord.HEADER_SIZE, self.example_id.start),
            slice(self.example_id.stop, self.x.start),
            slice(self.x.stop, self.y.stop),
        )
        return not any(((records[:, part] ^ self.template[part]) & self.mask[part]).any() for part in around)


@functools.lru_cache(maxsize=64)
def record_layouts(features: FeatureSpec) -> tuple[RecordLayout, ...]:
    """The layouts of examples: one for each size a label can have, from the smallest."""
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


def _map_entry(key: bytes, feature: bytes) -> bytes:
    return _field(1, _field(1, key) + _field(2, feature))


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    high, low = divmod(value, 128)
    return bytes([low | 128]) + _varint(high) if high else bytes([low])
