"""The stock C++ worker of TFF as an engine, with deadlines, and without orphans or endless retries."""

import contextlib
import pathlib
import weakref
from collections.abc import Iterator
from typing import Self

import grpc

from tff_pdp import _tff
from tff_pdp.engines.native import NativeContext, WorkerStub
from tff_pdp.engines.worker import WorkerProcess
from tff_pdp.errors import EngineError
from tff_pdp.runtime.engines.event_loop import EventLoopThread


def build_native_engine(
    *,
    device: str = "cpu",
    start_timeout_seconds: float = 60.0,
    max_concurrent_clients: int | None = None,
    max_message_megabytes: int = 2000,
    worker_binary: pathlib.Path | None = None,
) -> "NativeEngine":
    """Starts TFF's C++ worker and connects to it.

    Args:
        device: `cpu`, or `auto`, which is the same here.
        start_timeout_seconds: How long the worker may take until it listens.
        max_concurrent_clients: How many clients the worker computes at once (its memory grows with them); None leaves
            it to the worker.
        max_message_megabytes: The largest value that can be sent to or from the worker, at most 2047.
        worker_binary: Another worker than the one in TFF's wheel.

    Returns:
        The running engine; close it, or let it be collected.

    Raises:
        EngineError: If the device is not the CPU, an option is out of range, or the worker does not listen in time.
    """
    if device not in ("cpu", "auto"):
        raise EngineError(
            f"The native engine cannot use device {device!r}: the worker that PyPI ships contains no CUDA code. "
            "Use device 'cpu', or the engine 'inprocess'."
        )
    if max_concurrent_clients is not None and max_concurrent_clients < 1:
        raise EngineError(f"max_concurrent_clients must be at least 1, not {max_concurrent_clients}.")
    if not 1 <= max_message_megabytes <= 2047:
        raise EngineError(f"max_message_megabytes must lie between 1 and 2047, not {max_message_megabytes}.")
    return NativeEngine(
        worker_binary or _tff.worker_binary(),
        start_timeout_seconds=start_timeout_seconds,
        max_concurrent_clients=max_concurrent_clients,
        max_message_megabytes=max_message_megabytes,
    )


class NativeEngine:
    """Executes computations in one worker process, which lives as long as this object and no longer.

    The worker listens on a port of its own, but on every network interface and without any authentication: the binary
    has no option to do otherwise. Where other machines can reach this one, close the ephemeral ports to them.
    """

    name = "native"
    device = "cpu"

    def __init__(
        self,
        worker_binary: pathlib.Path,
        *,
        start_timeout_seconds: float,
        max_concurrent_clients: int | None,
        max_message_megabytes: int,
    ):
        """Starts the worker and waits for it; see `build_native_engine`."""
        flags = [
            # The worker takes a number that is not positive as "no bound".
            f"--max_concurrent_computation_calls={max_concurrent_clients or -1}",
            f"--grpc_max_message_length_megabytes={max_message_megabytes}",
        ]
        with contextlib.ExitStack() as resources:
            thread = EventLoopThread()
            resources.callback(thread.stop)
            # The kernel ties the worker to the thread that forks it; this thread lives as long as the engine, whereas
            # the one that builds the engine may end sooner.
            self._worker = thread.call(WorkerProcess, worker_binary, flags)
            channel = _open_channel(self._worker.port, max_message_megabytes)
            resources.callback(channel.close)
            resources.callback(self._worker.stop)
            self._worker.wait_until_it_listens(start_timeout_seconds)
            self._context = NativeContext(thread, self._worker, WorkerStub(channel))
            # Runs at `close`, when the engine is collected, or when the interpreter exits, whichever comes first.
            self._close = weakref.finalize(self, resources.pop_all().close)

    @property
    def process_id(self) -> int:
        """The process id of the worker."""
        return self._worker.process_id

    @contextlib.contextmanager
    def install(self) -> Iterator[Self]:
        """Sends the TFF computations called in this thread inside the `with` block to this engine."""
        with _tff.get_context_stack().install(self._context):
            yield self

    def close(self) -> None:
        """Kills the worker and ends the engine's thread; calling it again does nothing."""
        self._close()


def _open_channel(port: int, max_message_megabytes: int) -> grpc.Channel:
    max_bytes = max_message_megabytes * 1024 * 1024
    options = [
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        # A proxy set in the environment is not meant for our own machine.
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.insecure_channel(f"127.0.0.1:{port}", options)
