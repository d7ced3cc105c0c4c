"""Runs in the process of `FreshProcess`: reads jobs, each a line of JSON, and answers each job with a line of JSON.

A job has `export_dir`, `scratch` (a directory for temporary files), `timeout_seconds` and `expectations`; each
expectation has a `signature_name` and the files of its `inputs` and `outputs`. The answer to a job is
`{"refused": reason}`, or the findings: `signatures` (dtypes and shapes of inputs and outputs), `ops` (all ops of the
graph) and `warmup_requests` (number of warm-up requests that were run).

For a job, the worker checks the export, loads the export as a server does, and compares the export's answers with the
expectations. The worker calls `saved_model_cli` as a library: as a program, each run would import TensorFlow again.
"""

import contextlib
import io
import json
import math
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl.testing import flagsaver
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.tools import saved_model_cli
from tensorflow_serving.apis import predict_pb2

from serving.errors import RequestError
from serving.saved_model import layout, warmup
from serving.saved_model.checks import check_complete
from serving.saved_model.graph_checks import used_ops
from serving.saved_model.servable import DEFAULT_SIGNATURE, Servable, load_servable
from serving.saved_model.signatures import describe
from serving.verify.answers import check_answers
from tff_pdp.errors import ServingError

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false


Arrays = Mapping[str, np.ndarray]


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays that `fresh_process.save_arrays` wrote; strings are read as `bytes` objects."""
    request = predict_pb2.PredictRequest.FromString(path.read_bytes())
    return {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}


def _run_signature(export_dir: Path, signature_name: str, inputs: Arrays, scratch: Path) -> Arrays:
    """Loads the export once more, runs one signature on inputs from a file, and returns the answers by their keys."""
    file, answers = scratch / "inputs.npz", scratch / "answers"
    # Strings are pickled here, by the process that reads them: NumPy's own would lose zero bytes at their ends.
    np.savez(file, **{f"input_{index}": array for index, array in enumerate(inputs.values())})
    named = ";".join(f"{key}={file}[input_{index}]" for index, key in enumerate(inputs))
    _run_command(
        export_dir,
        "run",
        f"--tag_set={tf.saved_model.SERVING}",
        f"--signature_def={signature_name}",
        f"--inputs={named}",
        f"--outdir={answers}",
        "--overwrite",
    )
    return {path.stem: np.load(path, allow_pickle=True) for path in answers.glob("*.npy")}


def _run_command(export_dir: Path, command: str, *arguments: str) -> str:
    """Runs one command of `saved_model_cli` and returns its output; raises ServingError where the command fails."""
    printed = io.StringIO()
    # The flags are global to the process; the next command must not find those of this one.
    with flagsaver.flagsaver(), contextlib.redirect_stdout(printed):
        try:
            options = saved_model_cli.create_parser().parse_args([command, f"--dir={export_dir}", *arguments])
            options.func()
        # A malformed export fails in many ways, a parser with SystemExit.
        except (Exception, SystemExit) as error:
            raise ServingError(f"{export_dir}: saved_model_cli {command} fails: {error}") from error
    return printed.getvalue()


def try_export(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one job, and returns the answer to write; both are described at the top of this module."""
    export_dir = Path(job["export_dir"])
    try:
        return _try_export(export_dir, job["expectations"], Path(job["scratch"]))
    except ServingError as error:
        return {"refused": str(error)}
    # TensorFlow fails in undocumented ways on malformed exports; this process can go on with the next export.
    except Exception as error:
        return {"refused": f"{export_dir} cannot be verified: {type(error).__name__}: {error}"}


def _try_export(export_dir: Path, expectations: list[dict[str, str]], scratch: Path) -> dict[str, Any]:
    with contextlib.closing(load_servable(export_dir)) as servable:
        check_complete(export_dir)
        stored = list(warmup.read_requests(export_dir))
        _check_all_warm_up(export_dir, servable, stored)
        requests = [_checked_request(export_dir, servable, expectation) for expectation in expectations]
        requests += [(request.signature_name, request.inputs) for request in stored if request.method == layout.PREDICT]
        _try_command_line(export_dir, servable, requests, scratch)
        return {
            "signatures": {
                name: describe(signature) for name, signature in sorted(_callable_signatures(servable).items())
            },
            "ops": used_ops(export_dir),
            "warmup_requests": len(stored),
        }


def _check_all_warm_up(export_dir: Path, servable: Servable, stored: Sequence[warmup.WarmupRequest]) -> None:
    """Refuses an export with a signature that no warm-up request has run."""
    asked = {request.signature_name or DEFAULT_SIGNATURE for request in stored}
    if unasked := sorted(_callable_signatures(servable).keys() - asked):
        raise ServingError(
            f"{export_dir / layout.WARMUP_FILE} has no request for the signature {unasked[0]!r}, so that nothing of it "
            "was run; export the model again."
        )
    if not stored:
        raise ServingError(f"{export_dir / layout.WARMUP_FILE} holds no request; export the model again.")


def _callable_signatures(servable: Servable) -> dict[str, meta_graph_pb2.SignatureDef]:
    """Returns all signatures except that of the initialization, which has no inputs."""
    return {name: signature for name, signature in servable.signatures.items() if signature.inputs}


def _checked_request(export_dir: Path, servable: Servable, expectation: dict[str, str]) -> tuple[str, Arrays]:
    """Compares the answer to one request; returns the signature and the inputs of the request."""
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
    """Tries TensorFlow's own tool, as receivers of an export do: `show`, `scan` and `run`."""
    # Builds every function of the object graph, without running any.
    _run_command(export_dir, "show", "--all")
    # Looks for ops that read and write files, by TensorFlow's own list; prints them and does not fail.
    text = _run_command(export_dir, "scan")
    if "does not contain the default denylisted ops" not in text or "contains the following denylisted ops" in text:
        raise ServingError(f"{export_dir}: saved_model_cli scan finds forbidden ops: {text.strip()}")
    for signature_name, inputs in requests[:1]:
        answers = _run_signature(export_dir, signature_name, inputs, scratch)
        what = f"{export_dir}, run by saved_model_cli,"
        check_answers(what, answers, _answers(what, servable, signature_name, inputs))


# The worker waits longer than the parent by this, so that the parent reports the reason.
_GRACE_SECONDS = 10
_POLL_SECONDS = 1.0


def main() -> None:
    """Answers jobs until the parent process closes the pipe or ends."""
    parent = int(sys.argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # All output of TensorFlow goes to the log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # An export that takes all memory must cost this process its life, and no other.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_jobs, args=(parent, jobs), daemon=True).start()
    while True:
        job = jobs.get()
        # Ends this process even where TensorFlow hangs without letting a thread of Python run.
        signal.alarm(math.ceil(job["timeout_seconds"]) + _GRACE_SECONDS)
        print(json.dumps(try_export(job)), file=answers, flush=True)
        signal.alarm(0)


def _read_jobs(parent: int, jobs: queue.Queue[dict[str, Any]]) -> None:
    buffer = b""
    # Another process may have inherited the parent's end of the pipe, so its end of file is not enough.
    while os.getppid() == parent:
        if not select.select([0], [], [], _POLL_SECONDS)[0]:
            continue
        part = os.read(0, 1 << 16)
        if not part:
            break
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            jobs.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
