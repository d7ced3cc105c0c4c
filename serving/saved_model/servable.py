"""Loads one export, and runs its signatures in a session, as TensorFlow Serving does."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.saved_model.loader_impl import SavedModelLoader

from serving.errors import CODE_BY_NUMBER, RequestError, invalid_argument
from serving.saved_model import layout, warmup
from serving.saved_model.checks import check_export
from serving.saved_model.signatures import CHECKED_OUTPUTS, Signature, Tensors
from tff_pdp.errors import ServingError

DEFAULT_SIGNATURE = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
_METHODS = (
    tf.saved_model.PREDICT_METHOD_NAME,
    tf.saved_model.CLASSIFY_METHOD_NAME,
    tf.saved_model.REGRESS_METHOD_NAME,
)


def load_servable(export_dir: Path) -> "Servable":
    """Checks the export of one version, loads it on the CPU, and runs its warm-up requests.

    Raises:
      ServingError: the export fails a check, does not load, or does not answer one of its warm-up requests.
    """
    check_export(export_dir)
    try:
        servable = Servable(export_dir)
        _replay_warmup(servable, export_dir)
    # TensorFlow raises many types for a malformed model; whatever it is, the version must not take the server down.
    except Exception as error:
        raise ServingError(f"{export_dir} does not load: {error}") from error
    return servable


def _replay_warmup(servable: "Servable", export_dir: Path) -> None:
    for request in warmup.read_requests(export_dir):
        if request.method == layout.PREDICT:
            servable.predict(request.signature_name, request.inputs)
        else:
            servable.on_examples(request.method, request.signature_name, *request.inputs.values())


class Servable:
    """One loaded version of a model. Many threads may call it at the same time.

    Attributes:
      signatures: all SignatureDefs by name; requests can run a SignatureDef only if its method is predict, classify or
        regress.
    """

    def __init__(self, export_dir: Path):
        """Loads the SavedModel of one version without any check; call `load_servable` to check it first."""
        graph = tf.Graph()
        # A development server must not claim the accelerator that training uses.
        config = config_pb2.ConfigProto(device_count={"GPU": 0})
        with graph.as_default():
            self._session = tf.compat.v1.Session(graph=graph, config=config)
            # The public function warns that it is deprecated for programs, but TensorFlow Serving loads like it.
            meta_graph = SavedModelLoader(str(export_dir)).load(self._session, [tf.saved_model.SERVING])
        assert meta_graph is not None
        self.signatures: dict[str, meta_graph_pb2.SignatureDef] = dict(meta_graph.signature_def)
        self._runnable = {
            name: Signature(name, definition)
            for name, definition in self.signatures.items()
            if definition.method_name in _METHODS
        }
        self._callables = {name: self._make_callable(signature) for name, signature in self._runnable.items()}

    def signature(self, name: str, *, of_examples: bool = False) -> Signature:
        """Returns the signature that a request names; an empty name means `serving_default`.

        Raises:
          RequestError: no signature has the name. As in TensorFlow Serving, the code is FAILED_PRECONDITION, but
            INVALID_ARGUMENT for requests to classify or regress (`of_examples`).
        """
        name = name or DEFAULT_SIGNATURE
        if name in self._runnable:
            return self._runnable[name]
        if of_examples:
            raise invalid_argument(f"No signature was found with the name: {name}")
        raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.')

    def predict(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], output_filter: Sequence[str] = ()
    ) -> Tensors:
        """Runs one signature, and returns its outputs by their keys.

        Args:
          signature_name: name of the signature; empty for `serving_default`.
          inputs: array for each input of the signature, by key, with the dtype and shape that the signature declares.
          output_filter: keys of the outputs to return; empty for all outputs.

        Raises:
          RequestError: the request fails; code and message are those that TensorFlow Serving would send.
        """
        signature = self.signature(signature_name)
        signature.check_predict(inputs, output_filter)
        return filtered(self.run(signature.name, inputs), output_filter)

    def on_examples(self, method: str, signature_name: str, examples: np.ndarray) -> Tensors:
        """Runs one signature as `method` (`classify` or `regress`) on serialised `tf.Example` messages, bytes `[n]`.

        Returns:
          For `classify` with `k` classes, `classes` bytes `[n, k]`, `scores` float32 `[n, k]`, or both, as the
          signature declares. For `regress`, `outputs` float32 `[n]` or `[n, 1]`, as the signature declares.

        Raises:
          RequestError: the request fails; code and message are those that TensorFlow Serving would send.
        """
        signature = self.signature(signature_name, of_examples=True)
        outputs = self.run(signature.name, signature.examples_input(method, examples))
        return CHECKED_OUTPUTS[method](outputs, len(examples))

    def run(self, signature_name: str, inputs: Mapping[str, np.ndarray]) -> Tensors:
        """Runs a signature on inputs that `Signature` has checked, and returns all outputs by their keys.

        Raises:
          RequestError: an op failed; the error has the op's code and message.
        """
        signature = self._runnable[signature_name]
        try:
            outputs = self._callables[signature_name](*[inputs[key] for key in signature.input_keys])
        except tf.errors.OpError as error:
            message = error.message.removeprefix("Graph execution error:").strip()
            code = CODE_BY_NUMBER.get(error.error_code, grpc.StatusCode.UNKNOWN)
            raise RequestError(code, message) from error
        except UnicodeDecodeError as error:
            # The runtime quotes the refused input, and TensorFlow cannot raise a message that is not UTF-8.
            raise invalid_argument("An input was refused that is neither well-formed nor UTF-8.") from error
        return dict(zip(signature.output_keys, outputs, strict=True))

    def close(self) -> None:
        """Frees the session. Call this after the last request has ended; afterwards, no request can run."""
        self._callables.clear()
        self._session.close()
        del self._session

    def _make_callable(self, signature: Signature) -> Callable[..., list[np.ndarray]]:
        """Returns a function that runs a signature; arguments and results are in the order of sorted keys."""
        inputs, outputs = signature.definition.inputs, signature.definition.outputs
        options = config_pb2.CallableOptions(
            feed=[inputs[key].name for key in signature.input_keys],
            fetch=[outputs[key].name for key in signature.output_keys],
            # Runs in the calling thread: handing a small graph to a pool took 100 of 180 us.
            run_options=config_pb2.RunOptions(inter_op_thread_pool=-1),
        )
        # The public `make_callable` works out feeds and fetches again in Python at every call, which took 190 us of
        # the 330 us of a small request; this one hands the arrays to the runtime.
        return self._session._make_callable_from_options(options)


def filtered(outputs: Tensors, output_filter: Sequence[str]) -> Tensors:
    """Returns the outputs named in `output_filter`, in the filter's order; all outputs if the filter is empty."""
    return {key: outputs[key] for key in output_filter} if output_filter else outputs
