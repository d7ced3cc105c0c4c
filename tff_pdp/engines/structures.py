"""Converts the engine's values between nested `Struct`s of tensors and flat lists, which traced functions take.

A TFF sequence (a data set) is held as a scalar variant tensor, so every leaf of every value is a tensor.
"""

import collections
import functools
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.errors import EngineError

# TensorFlow's names for kinds of numbers. A number is never converted to another kind.
_KINDS = ("is_integer", "is_floating", "is_complex")


def flatten(value: Any, value_type: _tff.Type) -> list[Any]:
    """Returns the leaves of a value, in the order of the type's members."""
    if isinstance(value_type, _tff.StructType):
        members = _tff.iter_elements(value_type)
        return [leaf for index, (_, member) in enumerate(members) for leaf in flatten(value[index], member)]
    return [value]


def unflatten(leaves: Iterable[Any], value_type: _tff.Type) -> Any:
    """Builds a value of nested `Struct`s from its leaves; consumes exactly as many leaves as the type has."""
    leaves = iter(leaves)
    if isinstance(value_type, _tff.StructType):
        members = _tff.iter_elements(value_type)
        return _tff.Struct([(name, unflatten(leaves, member)) for name, member in members])
    return next(leaves)


# Rounds ask again and again for the same few types, whose hashes TFF stores.
_remembered = functools.lru_cache(maxsize=4096)


@_remembered
def leaf_types(value_type: _tff.Type) -> Sequence[_tff.Type]:
    """Returns the tensor and sequence types of the leaves of a type.

    Raises:
      EngineError: the type has a member that is neither tensor nor sequence, such as a function.
    """
    if isinstance(value_type, _tff.StructType):
        return tuple(leaf for _, member in _tff.iter_elements(value_type) for leaf in leaf_types(member))
    if not isinstance(value_type, _tff.TensorType | _tff.SequenceType):
        raise EngineError(
            f"The in-process engine does not take or return values of type {value_type.compact_representation()}."
        )
    return (value_type,)


@_remembered
def leaf_specs(value_type: _tff.Type, *, stacked: bool = False) -> Sequence[tf.TensorSpec]:
    """Returns shape and dtype of each leaf; `stacked` adds a leading axis of clients."""

    def spec(leaf: Any) -> tf.TensorSpec:
        if isinstance(leaf, _tff.SequenceType):
            return tf.TensorSpec([], tf.variant)
        shape = tf.TensorShape(leaf.shape)
        return tf.TensorSpec([None, *shape] if stacked and shape.rank is not None else shape, leaf.dtype)

    return tuple(spec(leaf) for leaf in leaf_types(value_type))


def from_python(value: Any, value_type: _tff.Type, where: str) -> list[tf.Tensor]:
    """Converts a caller's value to the tensors of its leaves.

    Args:
      value: value in one of the forms that TFF's own engine accepts. For a tensor, the forms are an array or tensor of
        the type or of a narrower type, and a number in the type's range. For a struct, they are a mapping, list, tuple
        or attrs object of such values. For a sequence, they are a data set and a list of elements.
      value_type: type of the value, without placement.
      where: name of the value in errors.

    Raises:
      TypeError: the value does not match the type; the message names the member.
    """
    if isinstance(value_type, _tff.StructType):
        members = list(_tff.iter_elements(value_type))
        parts = _parts(value, members, where)
        leaves = []
        for index, ((name, member), part) in enumerate(zip(members, parts, strict=True)):
            leaves += from_python(part, member, _within(where, name, index))
        return leaves
    if isinstance(value_type, _tff.SequenceType):
        return [tf.data.experimental.to_variant(_dataset(value, value_type, where))]
    return [_tensor(value, value_type, where)]


def federated_members(value: Any, value_type: _tff.Type, where: str) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each member of an argument; federated values and leaves are not divided further.

    Raises:
      TypeError: the argument's members differ from the type's; the message names both.
    """
    if not isinstance(value_type, _tff.StructType):
        yield where, value
        return
    members = list(_tff.iter_elements(value_type))
    for index, ((name, member), part) in enumerate(zip(members, _parts(value, members, where), strict=True)):
        yield from federated_members(part, member, _within(where, name, index))


def _within(where: str, name: str | None, index: int) -> str:
    return f"{where}.{name}" if name else f"{where}[{index}]"


def _parts(value: Any, members: Sequence[tuple[str | None, Any]], where: str) -> list[Any]:
    names = [name for name, _ in members]
    if isinstance(value, Mapping):
        if sorted(map(str, value)) != sorted(map(str, names)):
            raise TypeError(f"{where}: expected the members {names}, not {list(value)}")
        return [value[name] for name in names]
    if not isinstance(value, _tff.Struct):
        try:
            value = _tff.from_container(value)
        except TypeError:
            raise TypeError(f"{where}: expected the members {names}, not {type(value).__name__}") from None
    if len(value) != len(members):
        raise TypeError(f"{where}: expected the members {names}, not {len(value)} of them")
    given = _tff.to_elements(value)
    for (name, _), (own, _) in zip(members, given, strict=True):
        if own is not None and name is not None and own != name:
            raise TypeError(f"{where}: expected the member {name!r}, not {own!r}")
    return [part for _, part in given]


def _tensor(value: Any, value_type: Any, where: str) -> tf.Tensor:
    dtype = tf.as_dtype(value_type.dtype)
    try:
        tensor = value if isinstance(value, tf.Tensor) else _converted(value, dtype)
    except (TypeError, ValueError) as error:
        expected = value_type.compact_representation()
        raise TypeError(f"{where}: expected {expected}, not {reprlib.repr(value)}") from error
    if _is_narrower(tensor.dtype, dtype):
        tensor = tf.cast(tensor, dtype)
    if tensor.dtype != dtype or not leaf_specs(value_type)[0].shape.is_compatible_with(tensor.shape):
        raise TypeError(
            f"{where}: expected {value_type.compact_representation()}, not {tensor.dtype.name}{tensor.shape.as_list()}"
        )
    return tensor


def _converted(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Converts a value that is not a tensor; Python numbers, which have no dtype, get the given dtype."""
    is_plain = isinstance(value, bool | int | float | complex | str | bytes | list | tuple)
    if not is_plain or isinstance(value, np.generic):  # NumPy's numbers are floats and strings to Python.
        typed: Any = value
        return tf.convert_to_tensor(typed)
    # TensorFlow and NumPy wrap a number that is too large.
    if not _fits(value, dtype):
        raise ValueError(f"a number or string does not fit {dtype.name}")
    # Lists may hold arrays of narrower types, which TensorFlow does not convert.
    is_list = isinstance(value, list | tuple) and dtype != tf.string
    plain: Any = np.asarray(value, dtype.as_numpy_dtype) if is_list else value
    return tf.convert_to_tensor(plain, dtype)


def _fits(value: Any, dtype: tf.DType) -> bool:
    """Checks that a Python value fits a dtype, as in TFF's own engine: an int is not a float, a bool is not an int."""
    match value:
        case list() | tuple():
            return all(_fits(member, dtype) for member in value)
        case np.ndarray() | np.generic() | tf.Tensor():
            own = tf.as_dtype(value.dtype)
            return own == dtype or _is_narrower(own, dtype)
        case bool():
            return dtype.is_bool
        case int():
            return dtype.is_integer and int(value) in _integers(dtype)
        case float() | complex():
            is_kind = dtype.is_floating if isinstance(value, float) else dtype.is_complex
            return is_kind and not float(dtype.real_dtype.max) < abs(value) < math.inf
        case _:
            return isinstance(value, str | bytes) and dtype == tf.string


@functools.cache
def _integers(dtype: tf.DType) -> range:
    return range(int(dtype.min), int(dtype.max) + 1)


def _is_narrower(dtype: tf.DType, other: tf.DType) -> bool:
    """Checks that `other`, a dtype of the same kind, holds all numbers of `dtype`, and more."""
    if dtype == other:
        return False
    is_same_kind = any(getattr(dtype, kind) and getattr(other, kind) for kind in _KINDS)
    return is_same_kind and np.can_cast(dtype.as_numpy_dtype, other.as_numpy_dtype)


def _dataset(value: Any, value_type: Any, where: str) -> tf.data.Dataset:
    _check_order(value_type.element, where)
    if isinstance(value, tf.data.Dataset):
        element: Any = _tff.tensorflow_to_type(value.element_spec)
        _check_order(element, where)
        if not value_type.element.is_assignable_from(element):
            raise TypeError(f"{where}: expected elements of type {value_type.element}, not {element}")
        return value
    if not isinstance(value, list):
        raise TypeError(f"{where}: expected a tf.data.Dataset or a list of elements, not {type(value).__name__}")
    element_type = value_type.element
    rows = [from_python(element, element_type, f"{where}[{index}]") for index, element in enumerate(value)]

    def as_element(row: Iterable[Any]) -> Any:
        return _tff.to_container(unflatten(row, element_type), element_type)

    if rows and all(spec.shape.is_fully_defined() for spec in leaf_specs(element_type)):
        return tf.data.Dataset.from_tensor_slices(as_element(tf.stack(column) for column in zip(*rows, strict=True)))
    return tf.data.Dataset.from_generator(lambda: map(as_element, rows), output_signature=element_spec(element_type))


def _check_order(element_type: _tff.Type, where: str) -> None:
    """Refuses elements whose fields a computation could mistake for each other, as TFF's own engine does.

    A data set yields tensors without names: a dictionary's tensors sorted by name, a named tuple's or attrs class's in
    the declared order. Types inside a computation do not say which order applies.
    """
    if not isinstance(element_type, _tff.StructType):
        return
    names = [name for name, _ in _tff.iter_elements(element_type) if name is not None]
    kind = element_type.python_container if isinstance(element_type, _tff.StructWithPythonType) else None
    if kind not in (None, dict, collections.OrderedDict) and names != sorted(names):
        raise TypeError(
            f"{where}: the fields {names} of {kind.__name__} can be mistaken for each other in a data set, because "
            "they are not in sorted order; sort them, or use an OrderedDict"
        )
    for _, member in _tff.iter_elements(element_type):
        _check_order(member, where)


def element_spec(element_type: _tff.Type) -> Any:
    """Returns the element specification of a data set with elements of this type."""
    return _tff.to_container(unflatten(leaf_specs(element_type), element_type), element_type)


def build_container(value_type: Any) -> Callable[[Iterator[Any]], Any]:
    """Builds a reusable function `leaves -> value`, which returns values in the Python containers of the type."""
    if isinstance(value_type, _tff.SequenceType):
        spec = element_spec(value_type.element)
        return lambda leaves: tf.data.experimental.from_variant(next(leaves), spec)
    if not isinstance(value_type, _tff.StructType):
        return lambda leaves: _string_as_bytes(next(leaves))
    names = [name for name, _ in _tff.iter_elements(value_type)]
    members = [build_container(member) for _, member in _tff.iter_elements(value_type)]
    kind = value_type.python_container if isinstance(value_type, _tff.StructWithPythonType) else None
    if None not in names and names and kind in (None, collections.OrderedDict):
        return lambda leaves: collections.OrderedDict(zip(names, [build(leaves) for build in members], strict=True))
    # Named tuples, attrs classes and the like are built by TFF.
    opaque = [(name, _tff.TensorType(np.bool_)) for name in names]
    own_type = _tff.StructWithPythonType(opaque, kind) if kind is not None else _tff.StructType(opaque)
    return lambda leaves: _tff.to_container(
        _tff.Struct(zip(names, [build(leaves) for build in members], strict=True)), own_type
    )


def _string_as_bytes(leaf: Any) -> Any:
    # No device holds strings, so they are returned as bytes.
    return leaf.numpy() if isinstance(leaf, tf.Tensor) and leaf.dtype == tf.string else leaf


@_remembered
def with_client_axis(value_type: _tff.Type) -> Any:
    """Returns the type of values stacked along a new first axis of clients.

    Raises:
      TypeError: values of the type cannot be stacked.
    """
    if isinstance(value_type, _tff.StructType):
        return _tff.to_type([(name, with_client_axis(member)) for name, member in _tff.iter_elements(value_type)])
    if isinstance(value_type, _tff.TensorType):
        shape: Any = value_type.shape
        return _tff.TensorType(value_type.dtype, [None, *shape])
    raise TypeError(f"values of type {value_type.compact_representation()} cannot be stacked: only tensors can")
