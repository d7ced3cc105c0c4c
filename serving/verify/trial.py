"""What the fresh process does with an export: checks it, loads it as a server does, and compares its answers."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.framework import tensor_shape_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from serving.errors import RequestError
from serving.saved_model import layout, warmup
from serving.saved_model.file_checks import check_complete
from serving.saved_model.graph_checks import used_ops
from serving.saved_model.servable import DEFAULT_SIGNATURE, Servable, load_servable
from serving.verify import saved_model_cli
from serving.verify.answers import check_answers
from serving.verify.arrays import load_arrays
from tff_pdp.errors import ServingError

Arrays = Mapping[str, np.ndarray]


def try_export(job: dict[str, Any]) -> dict[str, Any]:
    """Answers one job of `serving.verify.worker`."""
    export_dir = Path(job["export_dir"])
    try:
        return _try_export(export_dir, job["expectations"], Path(job["scratch"]))
    except ServingError as error:
        return {"refused": str(error)}
    # A malformed export fails in ways of TensorFlow's that nobody lists; this process can go on with the next one.
    except Exception as error:
        return {"refused": f"{export_dir} cannot be verified: {type(error).__name__}: {error}"}


def _try_export(export_dir: Path, expectations: list[dict[str, str]], scratch: Path) -> dict[str, Any]:
    with contextlib.closing(load_servable(export_dir)) as servable:
        check_complete(export_dir)
        stored = list(warmup.read_requests(export_dir))
        _check_all_warm_up(export_dir, servable, stored)
        requests = [_checked_request(export_dir, servable, expectation) for expectation in expectations]
        requests += [(request.signature_name, request.inputs) for request in stored if request.kind == warmup.PREDICT]
        _try_command_line(export_dir, servable, requests, scratch)
        return {
            "signatures": {
                name: _described(signature) for name, signature in sorted(_callable_signatures(servable).items())
            },
            "ops": used_ops(export_dir),
            "warmup_requests": len(stored),
        }


def _check_all_warm_up(export_dir: Path, servable: Servable, stored: Sequence[warmup.WarmupRequest]) -> None:
    """Refuses an export with a signature of which nothing was run when it was loaded."""
    asked = {request.signature_name or DEFAULT_SIGNATURE for request in stored}
    if unasked := sorted(_callable_signatures(servable).keys() - asked):
        raise ServingError(
            f"{export_dir / layout.WARMUP_FILE} has no request for the signature {unasked[0]!r}, so that nothing of it "
            "was run; export the model again."
        )
    if not stored:
        raise ServingError(f"{export_dir / layout.WARMUP_FILE} holds no request; export the model again.")


def _callable_signatures(servable: Servable) -> dict[str, meta_graph_pb2.SignatureDef]:
    """All signatures but that of the initialization, which takes nothing."""
    return {name: signature for name, signature in servable.signatures.items() if signature.inputs}


def _checked_request(export_dir: Path, servable: Servable, expectation: dict[str, str]) -> tuple[str, Arrays]:
    """Compares one answer; returns the signature and the inputs that it answers."""
    signature_name = expectation["signature_name"] or DEFAULT_SIGNATURE
    inputs = load_arrays(Path(expectation["inputs"]))
    what = f"{export_dir}, signature {signature_name!r},"
    check_answers(what, _answers(what, servable, signature_name, inputs), load_arrays(Path(expectation["outputs"])))
    return signature_name, inputs


def _answers(what: str, servable: Servable, signature_name: str, inputs: Arrays) -> Arrays:
    try:
        return servable.predict(signature_name, inputs)
    except RequestError as error:
        raise ServingError(f"{what} answers with an error: {error.message}") from error


def _try_command_line(export_dir: Path, servable: Servable, requests: list[tuple[str, Arrays]], scratch: Path) -> None:
    """Whoever receives an export will try TensorFlow's own tool on it."""
    saved_model_cli.show(export_dir)
    saved_model_cli.scan(export_dir)
    for signature_name, inputs in requests[:1]:
        answers = saved_model_cli.run(export_dir, signature_name, inputs, scratch)
        what = f"{export_dir}, run by saved_model_cli,"
        check_answers(what, answers, _answers(what, servable, signature_name, inputs))


def _described(signature: meta_graph_pb2.SignatureDef) -> dict[str, Any]:
    return {
        "method": signature.method_name,
        "inputs": {key: _described_tensor(info) for key, info in sorted(signature.inputs.items())},
        "outputs": {key: _described_tensor(info) for key, info in sorted(signature.outputs.items())},
    }


def _described_tensor(info: meta_graph_pb2.TensorInfo) -> dict[str, Any]:
    return {"dtype": tf.as_dtype(info.dtype).name, "shape": _sizes(info.tensor_shape)}


def _sizes(shape: tensor_shape_pb2.TensorShapeProto) -> list[int | None] | None:
    """Sizes of all dimensions, None where one is open; None for any rank."""
    return None if shape.unknown_rank else [size.size if size.size >= 0 else None for size in shape.dim]
