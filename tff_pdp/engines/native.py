"""Runs computations on TFF's unmodified C++ worker, with deadlines, and without orphaned workers or endless retries.

A computation is sent once, and the worker is watched during the computation; errors say how the worker ended.
"""

import asyncio
import concurrent.futures
import contextlib
import pathlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Coroutine, Iterator
from typing import Any, Self, TypeVar

import grpc

from tff_pdp import _tff
from tff_pdp.engines.base import WithoutWorkers
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.worker import WorkerProcess
from tff_pdp.errors import EngineError

_Result = TypeVar("_Result")


class EventLoopThread:
    """Runs coroutines, in the order of their submission, in a thread of its own until it is stopped."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        # The target is a method of the loop, not of this object, so that the thread keeps nothing else alive. It is a
        # daemon because the interpreter would otherwise wait for it before anything could stop it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="tff-pdp-engine", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Starts a coroutine in the thread without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Ends the thread and abandons its running coroutines."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        # A finalizer may run in any thread, this one included, and a thread cannot wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)


_WATCH_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_KEPT_EXECUTORS = 10
# The largest value that can be sent to or from the worker; gRPC counts its bytes in 31 bits.
_MESSAGE_MEGABYTES = 2000


class WorkerStub(_tff.RemoteExecutorGrpcStub):
    """TFF's connection to a worker; a failure to free a value in the worker is ignored."""

    def __init__(self, channel: grpc.Channel):
        # TFF's own stub also subscribes to the channel's state. The thread that polls the state for gRPC raises an
        # exception that nobody can catch if the channel is closed meanwhile; we watch the process and its port instead.
        self._channel = channel
        self._stub = _tff.ExecutorGroupStub(channel)

    @property
    def is_ready(self) -> bool:
        """Always true: a stub is built only after the worker listens."""
        return True

    def dispose(self, request: Any) -> None:
        """Frees values in the worker; called from finalizers, where an exception could only be printed."""
        with contextlib.suppress(grpc.RpcError, ValueError):  # A dead worker, a closed channel.
            super().dispose(request)


class NativeContext(_tff.SyncContext):
    """Invokes computations on a worker, one at a time, from whichever thread calls.

    TFF's own context repeats a failed invocation for ever. Here a lost worker is an `EngineError`; the caller has a
    checkpoint, knows the privacy cost of the lost invocation, and may start again.
    """

    def __init__(self, thread: EventLoopThread, worker: WorkerProcess, stub: WorkerStub):
        self._thread = thread
        self._worker = worker
        self._invocation = threading.Lock()
        self._context = _tff.AsyncExecutionContext(
            executor_fn=_Executors(stub),
            compiler_fn=_tff.compile_to_native,
            transform_args=_tff.transform_args,
            transform_result=_tff.transform_result,
        )

    def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation to its end.

        Raises:
            EngineError: If the worker is not running, or ends meanwhile.
            grpc.RpcError: If the computation itself fails; the details carry TensorFlow's message.
        """
        with self._invocation:
            if not self._worker.is_alive:
                raise EngineError(f"TFF's worker is not running: {self._worker.describe_end()}")
            future = self._thread.submit(_tff.invoke_once(self._context, comp, _with_lists(arg)))
            while not _is_done(future, _WATCH_SECONDS):
                if not self._worker.is_alive and not _is_done(future, _GRACE_SECONDS):
                    future.cancel()
                    raise EngineError(f"TFF's worker ended during a computation: {self._worker.describe_end()}")
            error = future.exception()
            if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAVAILABLE:
                raise EngineError(f"TFF's worker ended during a computation: {self._describe_lost_worker()}") from error
            return future.result()

    def _describe_lost_worker(self) -> str:
        # The connection may break a moment before the process is gone.
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._worker.is_alive and time.monotonic() < deadline:
            time.sleep(_WATCH_SECONDS / 10)
        return self._worker.describe_end()


def _with_lists(argument: Any) -> Any:
    """Converts clients' values to lists, which TFF's own executors take."""
    if isinstance(argument, ClientValues):
        return list(argument)
    if isinstance(argument, _tff.Struct):
        return _tff.Struct([(name, _with_lists(member)) for name, member in _tff.to_elements(argument)])
    return argument


def _is_done(future: concurrent.futures.Future[Any], timeout_seconds: float) -> bool:
    return bool(concurrent.futures.wait([future], timeout=timeout_seconds).done)


class _Executors(_tff.ExecutorFactory):
    """The worker's executors, one per number of clients; if there are too many, the least recently used one is closed.

    TFF's factory forgets an executor without closing it, and the worker then keeps the executor for ever. Cohorts drawn
    by Poisson sampling have another size in every round.
    """

    def __init__(self, stub: WorkerStub):
        self._stub = stub
        self._executors: OrderedDict[int, _tff.RemoteExecutor] = OrderedDict()

    def create_executor(self, cardinalities: Any) -> _tff.RemoteExecutor:
        """Returns the executor for this number of clients; none of its values outlives an invocation."""
        num_clients = cardinalities.get(_tff.CLIENTS, 0)
        if num_clients not in self._executors:
            executor = _tff.RemoteExecutor(self._stub)
            executor.set_cardinalities({_tff.CLIENTS: num_clients})
            self._executors[num_clients] = executor
        self._executors.move_to_end(num_clients)
        if len(self._executors) > _KEPT_EXECUTORS:
            _, oldest = self._executors.popitem(last=False)
            oldest.close()
        return self._executors[num_clients]

    def clean_up_executor(self, cardinalities: Any) -> None:
        """Closes the executor in which an invocation has failed."""
        executor = self._executors.pop(cardinalities.get(_tff.CLIENTS, 0), None)
        if executor is not None:
            executor.close()


class NativeEngine(WithoutWorkers):
    """Executes computations in one worker process, which lives as long as this object.

    The worker listens on a port of its own, on every network interface and without authentication: the binary has no
    option to change this. If other machines can reach this machine, close the ephemeral ports to them.
    """

    name = "native"
    device = "cpu"

    def __init__(
        self,
        *,
        device: str = "cpu",
        start_timeout_seconds: float = 60.0,
        worker_binary: pathlib.Path | None = None,
    ):
        """Starts TFF's C++ worker and connects to it; `close` or garbage collection ends the worker.

        Args:
            device: `cpu`, or `auto`, which also means the CPU.
            start_timeout_seconds: Longest wait for the worker to listen.
            worker_binary: Path of the worker to start; by default the worker in TFF's wheel.

        Raises:
            EngineError: If the device is not the CPU, or the worker does not listen in time.
        """
        if device not in ("cpu", "auto"):
            raise EngineError(
                f"The native engine cannot use device {device!r}: the worker that PyPI ships contains no CUDA code. "
                "Use device 'cpu', or the engine 'inprocess'."
            )
        with contextlib.ExitStack() as resources:
            thread = EventLoopThread()
            resources.callback(thread.stop)

            async def start_worker() -> WorkerProcess:
                # A number below 1 means no bound.
                size = f"--grpc_max_message_length_megabytes={_MESSAGE_MEGABYTES}"
                flags = ["--max_concurrent_computation_calls=-1", size]
                return WorkerProcess(worker_binary or _tff.worker_binary(), flags)

            # The kernel ends the worker with the thread that forks it. The event loop's thread lives as long as the
            # engine; the thread that builds the engine may end sooner.
            self._worker = thread.submit(start_worker()).result()
            channel = _open_channel(self._worker.port)
            resources.callback(channel.close)
            resources.callback(self._worker.stop)
            self._worker.wait_until_it_listens(start_timeout_seconds)
            self._context = NativeContext(thread, self._worker, WorkerStub(channel))
            # Runs at `close`, when the engine is collected, or when the interpreter exits, whichever comes first.
            self._close = weakref.finalize(self, resources.pop_all().close)

    @contextlib.contextmanager
    def install(self) -> Iterator[Self]:
        """Sends the TFF computations called in this thread inside the `with` block to this engine."""
        with _tff.installed(self._context):
            yield self

    def close(self) -> None:
        """Kills the worker and ends the engine's thread; calling it again does nothing."""
        self._close()


def _open_channel(port: int) -> grpc.Channel:
    max_bytes = _MESSAGE_MEGABYTES * 1024 * 1024
    options = [
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        # A proxy set in the environment is not meant for our own machine.
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.insecure_channel(f"127.0.0.1:{port}", options)
