"""Predict requests whose tensors lie about their type, their shape or their content."""

import random
from typing import Any

import tensorflow as tf

from tests.serving.fuzz.cases import MARKER, NUMERIC_MARKER, GrpcCase, Oracle, ServedModel
from tests.serving.fuzz.proto_messages import PREDICT, valid_predict

_SIZES = [
    [2**62, 2**62],
    [2**31, 2**31, 4],
    [-1],
    [-(2**63)],
    [0],
    [1] * 300,
    [2**20, 2**20],
    [1, 4, 4, 2**40],
    [2**63 - 1],
]


def tensor(rng: random.Random, served: ServedModel) -> GrpcCase:
    """One of the two tensors lies about its type, its shape or its content."""
    request, _ = valid_predict(rng, served)
    tensor = request.inputs[rng.choice(["client_id", "x"])]
    for change in rng.sample(_TENSOR_CHANGES, rng.choice([1, 1, 2])):
        change(rng, tensor)
    return GrpcCase("tensor", PREDICT, request.SerializeToString(deterministic=True))


def _dtype(rng: random.Random, tensor: Any) -> None:
    tensor.dtype = rng.choice([*range(35), *range(100, 135), 999, -1, 2**31 - 1, -(2**31)])


def _sizes(rng: random.Random, tensor: Any) -> None:
    tensor.tensor_shape.Clear()
    for size in rng.choice([*_SIZES, []]):
        tensor.tensor_shape.dim.add(size=size, name=rng.choice(["", MARKER]))


def _unknown_rank(rng: random.Random, tensor: Any) -> None:
    tensor.tensor_shape.unknown_rank = True


def _content(rng: random.Random, tensor: Any) -> None:
    tensor.tensor_content = bytes(rng.randrange(256) for _ in range(rng.choice([0, 1, 3, 64, 65, 1000])))


def _other_values(rng: random.Random, tensor: Any) -> None:
    field = rng.choice(["half_val", "float_val", "double_val", "int_val", "int64_val", "bool_val", "uint64_val"])
    values = {"float_val": [NUMERIC_MARKER, float("nan")], "double_val": [1e308], "bool_val": [True]}
    getattr(tensor, field).extend(values.get(field, [1, 70_000]) * rng.randrange(1, 40))


def _strings(rng: random.Random, tensor: Any) -> None:
    tensor.string_val.extend([rng.choice([b"", b"\xff\n\0", MARKER.encode() * 1_000])] * rng.randrange(1, 40))


def _objects(rng: random.Random, tensor: Any) -> None:
    tensor.dtype = rng.choice([tf.resource.as_datatype_enum, tf.variant.as_datatype_enum, tensor.dtype])
    tensor.resource_handle_val.add(name=MARKER, container="c", device="/gpu:0", hash_code=1)
    variant = tensor.variant_val.add(type_name="tensorflow::TensorList", metadata=b"\xff" * 9)
    variant.tensors.add(dtype=1)


def _cleared(rng: random.Random, tensor: Any) -> None:
    tensor.ClearField(rng.choice([field.name for field, _ in tensor.ListFields()] or ["dtype"]))


def _version_number(rng: random.Random, tensor: Any) -> None:
    tensor.version_number = rng.choice([-1, 2**31 - 1])


_TENSOR_CHANGES = [
    _dtype, _sizes, _unknown_rank, _content, _other_values, _strings, _objects, _cleared, _version_number,
]  # fmt: skip


def splat(rng: random.Random, served: ServedModel) -> GrpcCase:
    """One value that stands for a whole tensor of terabytes."""
    request, _ = valid_predict(rng, served)
    tensor = request.inputs["x"]
    tensor.Clear()
    tensor.dtype = tf.float32.as_datatype_enum
    tensor.float_val.append(1.0)
    for size in [rng.choice([2**16, 2**20, 2**24, 2**31 - 1, 2**40]), *served.input_shape]:
        tensor.tensor_shape.dim.add(size=size)
    return GrpcCase("splat", PREDICT, request.SerializeToString(deterministic=True), Oracle.REFUSED)
