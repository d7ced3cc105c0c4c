"""Defines the server's options: limits on requests, and options for merging requests into batches.

The options for batches can be read from a file of TensorFlow Serving's batching parameters.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format, wrappers_pb2
from google.protobuf.message import Message

from tff_pdp.errors import ServingError

# The message is built at run time, where a type checker cannot see it.
# pyright: reportAttributeAccessIssue=false


_PACKAGE = "tff_pdp.serving"
_Field = descriptor_pb2.FieldDescriptorProto
_READ = ("max_batch_size", "max_enqueued_batches", "num_batch_threads")
# The fields of `tensorflow.serving.BatchingParameters` that are wrapped: `max_batch_size { value: 64 }`.
_WRAPPERS = dict.fromkeys((*_READ, "batch_timeout_micros", "max_execution_batch_size"), "Int64Value") | {
    "thread_pool_name": "StringValue",
    "enable_large_batch_splitting": "BoolValue",
}


@dataclasses.dataclass(frozen=True)
class BatchingOptions:
    """Options for merging requests, under the names of TensorFlow Serving's batching parameters.

    Attributes:
      max_batch_size: largest number of examples in one batch. A larger request runs on its own; TensorFlow Serving
        without `enable_large_batch_splitting` would refuse it.
      max_enqueued_batches: largest number of batches waiting for one signature; further requests get UNAVAILABLE.
      num_batch_threads: largest number of batches of one signature that run at the same time.
      allowed_batch_sizes: sizes to which batches are padded, ascending; `max_batch_size` is last. Empty: no padding.

    Raises:
      ServingError: a value is wrong; the message names the first wrong value.
    """

    max_batch_size: int = 64
    max_enqueued_batches: int = 100
    num_batch_threads: int = 1
    allowed_batch_sizes: tuple[int, ...] = ()

    def __post_init__(self):
        for name in _READ:
            if getattr(self, name) < 1:
                raise ServingError(f"{name} must be positive; was {getattr(self, name)}")
        sizes = self.allowed_batch_sizes
        if not sizes:
            return
        if sizes[0] < 1 or any(size >= following for size, following in itertools.pairwise(sizes)):
            raise ServingError(f"allowed_batch_sizes entries must be positive and increasing; were {list(sizes)}")
        if sizes[-1] != self.max_batch_size:
            raise ServingError(
                "Last entry in allowed_batch_sizes must match max_batch_size; last entry was "
                f"{sizes[-1]}; expected {self.max_batch_size}"
            )

    def padded_size(self, num_examples: int) -> int:
        """Returns the smallest allowed batch size of at least `num_examples`; `num_examples` if no size is so large."""
        return next((size for size in self.allowed_batch_sizes if size >= num_examples), num_examples)


def read_batching_file(path: Path) -> BatchingOptions:
    """Reads a file of TensorFlow Serving's batching parameters; missing fields get the defaults of `BatchingOptions`.

    Fields that `BatchingOptions` lacks are accepted but have no effect: batches never wait for a timeout, requests with
    different inner shapes are never padded to the same shape, and large requests are never split.

    Raises:
      ServingError: the file cannot be read, or a value is out of range.
    """
    try:
        parameters = text_format.Parse(path.read_text(encoding="utf-8"), _message_class()())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ServingError(f"{path} is not a readable batching parameters file: {error}") from error
    values = {name: getattr(parameters, name).value for name in _READ if parameters.HasField(name)}
    try:
        return BatchingOptions(**values, allowed_batch_sizes=tuple(parameters.allowed_batch_sizes))
    except ServingError as error:
        raise ServingError(f"{path}: {error}") from error


@functools.cache
def _message_class() -> type[Message]:
    """Builds a message of these fields, numbered in any order: their numbers do not matter in the text form."""
    wrappers = wrappers_pb2.DESCRIPTOR
    file = descriptor_pb2.FileDescriptorProto(
        name="batching_parameters.proto", package=_PACKAGE, syntax="proto3", dependency=[wrappers.name]
    )
    fields = file.message_type.add(name="BatchingParameters").field
    fields.add(name="allowed_batch_sizes", type=_Field.TYPE_INT64, label=_Field.LABEL_REPEATED)
    fields.add(name="pad_variable_length_inputs", type=_Field.TYPE_BOOL)
    for name, wrapper in _WRAPPERS.items():
        fields.add(name=name, type=_Field.TYPE_MESSAGE, type_name=f".{wrappers.package}.{wrapper}")
    for number, field in enumerate(fields, start=1):
        field.number = number
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.BatchingParameters"))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on requests.

    Attributes:
      max_bytes: largest size of an unpacked request, in bytes; a larger REST body is answered with 413.
      max_elements: largest number of elements in an input tensor of a gRPC request; a few bytes may encode very many.
      timeout_seconds: seconds that a REST client may take to send the headers, to send the body or to receive the
        answer, and seconds that its connection may be idle.
      grace_seconds: seconds that running requests get to finish when the server stops.

    Raises:
      ServingError: a value is not positive; the message names the first one.
    """

    max_bytes: int = 64 * 2**20
    max_elements: int = 16 * 2**20
    timeout_seconds: float = 30.0
    grace_seconds: float = 5.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ServingError(f"{field.name} must be positive; was {value}")
