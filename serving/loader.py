"""Loading one export and running its signatures, the way TensorFlow Serving does: SignatureDefs in a session."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from serving import layout, warmup
from serving.checks import check_export
from serving.errors import RequestError, code_from_number, invalid_argument
from tff_pdp.errors import ServingError

Tensors = dict[str, np.ndarray]


def load_servable(export_dir: Path) -> "Servable":
    """Checks an export, loads it on the CPU and replays its warm-up requests.

    Raises:
      ServingError: if a check refuses the export, or it does not load or answer its own warm-up requests.
    """
    check_export(export_dir)
    try:
        servable = Servable(export_dir)
        for request in warmup.read_requests(export_dir):
            servable.predict(request.signature_name, request.inputs)
    # TensorFlow raises many types for a malformed model; whatever it is, the version must not take the server down.
    except Exception as error:
        raise ServingError(f"{export_dir} does not load: {error}") from error
    return servable


class Servable:
    """One loaded version. Safe to call from many threads.

    The session is freed with the last reference, so a version that is replaced finishes its running requests.

    Attributes:
      signatures: the SignatureDefs by name.
    """

    def __init__(self, export_dir: Path):
        """Loads the SavedModel under `export_dir`, unchecked; `load_servable` is the way in."""
        graph = tf.Graph()
        # A development server must not claim the accelerator that training uses.
        config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        with graph.as_default(), _without_deprecation_warnings():
            session = tf.compat.v1.Session(graph=graph, config=config)
            meta_graph = tf.compat.v1.saved_model.load(session, [tf.saved_model.SERVING], str(export_dir))
            self.signatures: dict[str, meta_graph_pb2.SignatureDef] = dict(meta_graph.signature_def)
            self._callables = {
                name: _make_callable(session, signature)
                for name, signature in self.signatures.items()
                if signature.method_name == tf.saved_model.PREDICT_METHOD_NAME
            }

    def signature(self, name: str) -> meta_graph_pb2.SignatureDef:
        """Returns the SignatureDef called `name`, or the default one for an empty name.

        Raises:
          RequestError: FAILED_PRECONDITION if there is none that predicts.
        """
        name = name or layout.SIGNATURE_NAMES[0]
        if name not in self._callables:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.')
        return self.signatures[name]

    def predict(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], output_filter: Sequence[str] = ()
    ) -> Tensors:
        """Runs one signature.

        Args:
          signature_name: empty for `serving_default`.
          inputs: one array for each input of the signature, by its key, of the declared dtype.
          output_filter: keys of the outputs to return; all of them if empty.

        Returns:
          The outputs by their keys.

        Raises:
          RequestError: with the code and message that TensorFlow Serving would send.
        """
        signature = self.signature(signature_name)
        _check_inputs(signature, inputs)
        _check_output_filter(signature, output_filter)
        run = self._callables[signature_name or layout.SIGNATURE_NAMES[0]]
        try:
            outputs = run(*(inputs[key] for key in sorted(signature.inputs)))
        except tf.errors.OpError as error:
            message = error.message.removeprefix("Graph execution error:").strip()
            raise RequestError(code_from_number(error.error_code), message) from error
        named = dict(zip(sorted(signature.outputs), outputs, strict=True))
        return {key: named[key] for key in output_filter} if output_filter else named


def check_input_names(signature: meta_graph_pb2.SignatureDef, names: Iterable[str]) -> None:
    """Compares the names of the inputs sent with those the signature has.

    Raises:
      RequestError: INVALID_ARGUMENT naming what is missing or extra.
    """
    required, sent = set(signature.inputs), set(names)
    if len(sent) != len(required):
        raise invalid_argument(
            f"input size does not match signature: {len(sent)}!={len(required)} len({_braced(sent)}) != "
            f"len({_braced(required)}). Sent extra: {_braced(sent - required)}. "
            f"Missing but required: {_braced(required - sent)}."
        )
    for name in sorted(sent - required):
        raise invalid_argument(
            f"input tensor alias not found in signature: {name}. Inputs expected to be in the set {_braced(required)}."
        )


@contextlib.contextmanager
def _without_deprecation_warnings() -> Iterator[None]:
    """Hides one warning: the session loader is deprecated for programs, but is how TensorFlow Serving works."""

    def keep(record: logging.LogRecord) -> bool:
        return "is deprecated" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _make_callable(session: tf.compat.v1.Session, signature: meta_graph_pb2.SignatureDef) -> Callable[..., list]:
    """Binds a signature to positional arrays, inputs and outputs in the order of their sorted keys."""
    return session.make_callable(
        fetches=[signature.outputs[key].name for key in sorted(signature.outputs)],
        feed_list=[signature.inputs[key].name for key in sorted(signature.inputs)],
    )


def _check_inputs(signature: meta_graph_pb2.SignatureDef, inputs: Mapping[str, np.ndarray]) -> None:
    check_input_names(signature, inputs)
    for key, array in inputs.items():
        expected, actual = tf.as_dtype(signature.inputs[key].dtype), tf.as_dtype(array.dtype)
        if actual != expected:
            # The session would cast in silence; the C++ server does not.
            raise invalid_argument(f"Expects arg[{key}] to be {expected.name} but {actual.name} is provided")
        declared = signature.inputs[key].tensor_shape
        shape = tf.TensorShape(declared)  # pyright: ignore[reportArgumentType]
        if not shape.is_compatible_with(array.shape):
            raise invalid_argument(f"input {key} has shape {list(array.shape)}, but the signature has {shape}")


def _check_output_filter(signature: meta_graph_pb2.SignatureDef, output_filter: Sequence[str]) -> None:
    for index, key in enumerate(output_filter):
        if key not in signature.outputs:
            raise invalid_argument(
                f"output tensor alias not found in signature: {key} Outputs expected to be in the set "
                f"{_braced(signature.outputs)}."
            )
        if key in output_filter[:index]:
            raise invalid_argument(f"duplicate output tensor alias: {key}")


def _braced(keys: Iterable[str]) -> str:
    return "{" + ",".join(sorted(keys)) + "}"
