"""Loads exports in a separate process, as a server would; refuses an export if that process crashes or hangs."""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

import serving
from tff_pdp.errors import ServingError

TIMEOUT_SECONDS = 120.0
_LOG_TAIL_BYTES = 2000


@dataclasses.dataclass(frozen=True)
class Expectation:
    """A request to an export, and the answer that it must get.

    Attributes:
      signature_name: name of the signature; empty for `serving_default`.
      inputs: array for each input, by key; arrays of strings have the dtype object.
      outputs: right outputs by key, with the signature's dtypes and shapes; outputs without an entry are not compared.
    """

    signature_name: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


class FreshProcess:
    """A separate process that verifies exports; it imports TensorFlow, but no training code.

    The import takes seconds, and the caller need not wait: create this object early, and verify later. The
    process ends with the `with` block or with its parent. If a verification crashes or takes too long, the next
    verification starts a new process.

    Example:
      >>> with FreshProcess() as process:
      ...     process.verify(Path("no such export"))
      Traceback (most recent call last):
        ...
      tff_pdp.errors.ServingError: no such export is not a directory.
    """

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS):
        """Starts the process without waiting; `timeout_seconds` limits each verification, including the import."""
        self._timeout_seconds = timeout_seconds
        self._worker = _Worker()

    def __enter__(self) -> "FreshProcess":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; a second call does nothing."""
        self._worker.stop()

    def verify(self, export_dir: Path, expectations: Sequence[Expectation] = ()) -> dict[str, Any]:
        """Checks an export, loads it, runs its warm-up requests and compares its answers. Make one call at a time.

        Args:
          export_dir: the directory of one version.
          expectations: requests and their right answers; see `serving.verify.answers.check_answers` for the tolerance.

        Returns:
          The findings as JSON values; see `serving.verify.worker`.

        Raises:
          ServingError: the export is refused, or the process died or did not answer in time.
        """
        if self._worker.process.poll() is not None:
            self._worker.stop()
            self._worker = _Worker()
        with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
            job = {
                "export_dir": str(export_dir),
                "scratch": scratch,
                "timeout_seconds": self._timeout_seconds,
                "expectations": _write(expectations, Path(scratch)),
            }
            try:
                answer = self._worker.ask(job, self._timeout_seconds)
            except _WorkerFailed as failure:
                self._worker.stop()
                raise ServingError(f"{export_dir} is refused: the process that loaded it {failure}") from failure
            except BaseException:
                # A late answer would be taken for the answer to the next job.
                self._worker.stop()
                raise
        if "refused" in answer:
            raise ServingError(answer["refused"])
        return answer


class _WorkerFailed(Exception):
    """The reason why a worker did not answer."""


class _Worker:
    """One child process: a line of JSON in, a line of JSON out."""

    def __init__(self):
        # The child must not write into our output. The file has no name, so nothing is left behind however we end.
        self._log: IO[bytes] = tempfile.TemporaryFile(prefix="verify-log-")  # noqa: SIM115 - open as long as self
        package_root = str(Path(serving.__file__).parents[1])
        self.process = subprocess.Popen(
            # -P: nothing is imported from the working directory.
            [sys.executable, "-P", "-m", "serving.verify.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])]),
                # Exports are served on the CPU, and training may hold the accelerator.
                "CUDA_VISIBLE_DEVICES": "-1",
                # Fatal messages only: every machine without an accelerator would cause warnings.
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
            # Ctrl-C in the terminal is for us to handle; we stop the worker afterwards.
            start_new_session=True,
        )
        # Also runs when this object is collected and when the interpreter exits.
        self.stop = weakref.finalize(self, _stop, self.process, os.getpid())

    def ask(self, job: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
        except BrokenPipeError:
            raise self._died() from None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _WorkerFailed(f"did not finish within {timeout_seconds:g} s.")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise self._died()
            line += part
        return json.loads(line)

    def _died(self) -> _WorkerFailed:
        status = self.process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").strip()
        return _WorkerFailed(f"{how}. The end of its log:\n{tail}" if tail else f"{how}.")


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # A forked copy of us must not stop the worker that we still use.
        return
    # The worker has no state that an orderly end would save.
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _write(expectations: Sequence[Expectation], scratch: Path) -> list[dict[str, str]]:
    """Writes the arrays of all expectations, and returns their files for the worker."""
    written = []
    for index, expectation in enumerate(expectations):
        inputs, outputs = scratch / f"inputs-{index}.pb", scratch / f"outputs-{index}.pb"
        save_arrays(inputs, expectation.inputs)
        save_arrays(outputs, expectation.outputs)
        written.append({"signature_name": expectation.signature_name, "inputs": str(inputs), "outputs": str(outputs)})
    return written


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to a file, as a `PredictRequest`; arrays of strings may have a string dtype or the dtype object."""
    # Imported late: without expectations, this process leaves TensorFlow to the worker.
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2

    tensors = {name: tf.make_tensor_proto(array) for name, array in arrays.items()}
    # The class is built at run time.
    request = predict_pb2.PredictRequest(inputs=tensors)  # pyright: ignore[reportAttributeAccessIssue]
    path.write_bytes(request.SerializeToString())
