"""Checks requests against their signature (errors have TensorFlow Serving's messages), and describes signatures."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from serving.errors import invalid_argument
from serving.saved_model.layout import CLASSIFY, REGRESS

Tensors = dict[str, np.ndarray]

# TensorFlow Serving finds these tensors of a signature by exactly these keys.
EXAMPLES_KEY = tf.saved_model.CLASSIFY_INPUTS
CLASSES_KEY = tf.saved_model.CLASSIFY_OUTPUT_CLASSES
SCORES_KEY = tf.saved_model.CLASSIFY_OUTPUT_SCORES
VALUES_KEY = tf.saved_model.REGRESS_OUTPUTS


class Signature:
    """One SignatureDef of a loaded version.

    Attributes:
      name: name of the signature.
      definition: the SignatureDef.
      input_keys: keys of the inputs, sorted.
      output_keys: keys of the outputs, sorted.
      is_batchable: whether requests can be merged; true if the first dimension of every input and output has any size.
    """

    def __init__(self, name: str, definition: meta_graph_pb2.SignatureDef):
        self.name = name
        self.definition = definition
        self.input_keys = tuple(sorted(definition.inputs))
        self.output_keys = tuple(sorted(definition.outputs))
        shapes = [info.tensor_shape.dim for info in (*definition.inputs.values(), *definition.outputs.values())]
        self.is_batchable = all(shape and shape[0].size < 0 for shape in shapes)
        # The dtype and the sizes: `object` for strings, None for sizes of any number.
        self._expected = {key: (_dtype(info), _shape(info)) for key, info in definition.inputs.items()}

    def check_predict(self, inputs: Mapping[str, np.ndarray], output_filter: Sequence[str]) -> None:
        """Checks names, dtypes and shapes of a predict request's inputs, and the output keys in `output_filter`.

        Raises:
          RequestError: a check fails (INVALID_ARGUMENT); the message names the first fault.
        """
        self._check_input_names(inputs.keys())
        for key, array in inputs.items():
            dtype, shape = self._expected[key]
            # The session would cast in silence; the C++ server does not.
            if array.dtype != dtype and not (dtype.kind == "O" and array.dtype.kind in "SU"):
                raise invalid_argument(
                    f"Expects arg[{key}] to be {_dtype_name(dtype)} but {_dtype_name(array.dtype)} is provided"
                )
            if not _fits(array.shape, shape):
                raise invalid_argument(f"input {key} has shape {list(array.shape)}, but the signature has {shape}")
        if output_filter:
            self._check_output_filter(output_filter)

    def _check_input_names(self, sent: Set[str]) -> None:
        required = self._expected.keys()
        if sent == required:
            return
        if len(sent) != len(required):
            raise invalid_argument(
                f"input size does not match signature: {len(sent)}!={len(required)} len({_braced(sent)}) != "
                f"len({_braced(required)}). Sent extra: {_braced(sent - required)}. "
                f"Missing but required: {_braced(required - sent)}."
            )
        raise invalid_argument(
            f"input tensor alias not found in signature: {min(sent - required)}. "
            f"Inputs expected to be in the set {_braced(required)}."
        )

    def _check_output_filter(self, output_filter: Sequence[str]) -> None:
        for index, key in enumerate(output_filter):
            if key not in self.output_keys:
                raise invalid_argument(
                    f"output tensor alias not found in signature: {key} Outputs expected to be in the set "
                    f"{_braced(self.output_keys)}."
                )
            if key in output_filter[:index]:
                raise invalid_argument(f"duplicate output tensor alias: {key}")

    def examples_input(self, method: str, examples: np.ndarray) -> Tensors:
        """Returns the inputs, by key, with which the signature runs `method` (`classify` or `regress`) on examples.

        `examples` has serialised `tf.Example` messages, bytes `[n]`.

        As in TensorFlow Serving, a signature can run `method` if its tensors have the right names; the method name that
        the signature declares does not matter.

        Raises:
          RequestError: INVALID_ARGUMENT if the signature cannot run `method`, or there are no examples.
        """
        is_classify = method == CLASSIFY
        if len(self.input_keys) != 1:
            raise invalid_argument("Expected one input Tensor.")
        if len(self.output_keys) not in ((1, 2) if is_classify else (1,)):
            found = f"Expected one or two output Tensors, found {len(self.output_keys)}"
            raise invalid_argument(found if is_classify else "Expected one output Tensor.")
        if EXAMPLES_KEY not in self.input_keys:
            noun = "classification" if is_classify else "regression"
            raise invalid_argument(f"No {noun} inputs found in SignatureDef: {self.definition}")
        if is_classify and not {CLASSES_KEY, SCORES_KEY} & set(self.output_keys):
            raise invalid_argument(
                f'Expected classification signature outputs to contain at least one of "{CLASSES_KEY}" or '
                f'"{SCORES_KEY}". Signature was: {self.definition}'
            )
        if not is_classify and VALUES_KEY not in self.output_keys:
            raise invalid_argument(f"No regression outputs found in SignatureDef: {self.definition}")
        if not len(examples):
            raise invalid_argument("Input is empty.")
        return {EXAMPLES_KEY: examples}


def _checked_classes(outputs: Tensors, num_examples: int) -> Tensors:
    found = {key: outputs[key] for key in (CLASSES_KEY, SCORES_KEY) if key in outputs}
    for key, array in found.items():
        if array.ndim != 2:
            raise invalid_argument(f"Expected Tensor shape: [batch_size num_classes] but got {_listed(array.shape)}")
        is_right = array.dtype == np.float32 if key == SCORES_KEY else array.dtype == object
        if not is_right:
            wanted = "DT_FLOAT" if key == SCORES_KEY else "DT_STRING"
            raise invalid_argument(f"Expected {key} Tensor of {wanted}. Got: DT_{_dtype_name(array.dtype).upper()}")
        if len(array) != num_examples:
            raise invalid_argument(f"Expected {key} output batch size of {num_examples}. Got: {len(array)}")
    classes, scores = found.get(CLASSES_KEY), found.get(SCORES_KEY)
    if classes is not None and scores is not None and classes.shape != scores.shape:
        raise invalid_argument(
            f"Tensors class and score should match in dim_size(1). Got {classes.shape[1]} vs. {scores.shape[1]}"
        )
    return found


def _checked_values(outputs: Tensors, num_examples: int) -> Tensors:
    values = outputs[VALUES_KEY]
    if values.ndim != 1 and values.shape[1:] != (1,):
        raise invalid_argument(
            f"Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got {_listed(values.shape)}"
        )
    if len(values) != num_examples:
        raise invalid_argument(f"Input batch size did not match output batch size: {num_examples} vs. {len(values)}")
    if values.dtype != np.float32:
        raise invalid_argument(f"Expected output Tensor of DT_FLOAT.  Got: DT_{_dtype_name(values.dtype).upper()}")
    return {VALUES_KEY: values}


# By method, a function that checks outputs for a number of examples and returns the answer's outputs; see
# `Servable.on_examples`.
CHECKED_OUTPUTS = {CLASSIFY: _checked_classes, REGRESS: _checked_values}


def describe(definition: meta_graph_pb2.SignatureDef) -> dict[str, Any]:
    """Describes a signature as JSON: its `method`, and the `dtype` and `shape` of `inputs` and `outputs` by key."""
    return {
        "method": definition.method_name,
        "inputs": {key: _described(definition.inputs[key]) for key in sorted(definition.inputs)},
        "outputs": {key: _described(definition.outputs[key]) for key in sorted(definition.outputs)},
    }


def _described(info: meta_graph_pb2.TensorInfo) -> dict[str, Any]:
    return {"dtype": tf.as_dtype(info.dtype).name, "shape": _shape(info)}


def _shape(info: meta_graph_pb2.TensorInfo) -> tuple[int | None, ...] | None:
    """Returns the sizes of a tensor, None for an open size; only None for an open rank."""
    if info.tensor_shape.unknown_rank:
        return None
    return tuple([None if dimension.size < 0 else dimension.size for dimension in info.tensor_shape.dim])


def _dtype(info: meta_graph_pb2.TensorInfo) -> np.dtype:
    return np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype)


def _fits(actual: tuple[int, ...], expected: tuple[int | None, ...] | None) -> bool:
    if expected is None:
        return True
    if actual[1:] == expected[1:] and len(actual) == len(expected) and expected and expected[0] is None:
        return True  # As almost always.
    return len(actual) == len(expected) and all(
        size is None or size == found for found, size in zip(actual, expected, strict=True)
    )


def _dtype_name(dtype: np.dtype) -> str:
    try:
        return tf.as_dtype(dtype).name
    except TypeError:
        return str(dtype)


def _listed(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _braced(keys: Iterable[str]) -> str:
    return "{" + ",".join(sorted(keys)) + "}"
