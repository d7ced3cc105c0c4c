"""How a computation is sent to TFF's C++ worker: one attempt, watched, with errors that say what happened."""

import concurrent.futures
import contextlib
import threading
import time
from collections import OrderedDict
from typing import Any

import grpc

from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.worker import WorkerProcess
from tff_pdp.errors import EngineError
from tff_pdp.runtime.engines.event_loop import EventLoopThread

_WATCH_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_KEPT_EXECUTORS = 10


class WorkerStub(_tff.RemoteExecutorGrpcStub):
    """TFF's connection to a worker, for which a value that cannot be disposed of is no failure."""

    def __init__(self, channel: grpc.Channel):
        # TFF's own also subscribes to the channel's state. The thread that polls it for gRPC raises an exception that
        # nobody can catch where the channel is closed meanwhile; we ask the worker's process and port instead.
        self._channel = channel
        self._stub = _tff.ExecutorGroupStub(channel)

    @property
    def is_ready(self) -> bool:
        """True: there is no stub before its worker listens."""
        return True

    def dispose(self, request: Any) -> None:
        """Frees values in the worker; called from finalizers, where an exception could only be printed."""
        with contextlib.suppress(grpc.RpcError, ValueError):  # A dead worker, a closed channel.
            super().dispose(request)


class NativeContext(_tff.SyncContext):
    """Invokes computations on a worker, one at a time, from whichever thread calls.

    TFF's own context repeats a failed invocation for ever. Here a lost worker is an `EngineError`; starting again is
    for the caller, who has a checkpoint and knows what the lost invocation has cost.
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
                raise EngineError(f"The native engine's worker is not running: {self._worker.describe_end()}")
            future = self._thread.submit(_tff.invoke_once(self._context, comp, _with_lists(arg)))
            while not _is_done(future, _WATCH_SECONDS):
                if not self._worker.is_alive and not _is_done(future, _GRACE_SECONDS):
                    future.cancel()
                    raise EngineError(f"TFF's worker ended during a computation: {self._worker.describe_end()}")
            if _is_lost_connection(future.exception()):
                raise EngineError(
                    f"TFF's worker ended during a computation: {self._describe_lost_worker()}"
                ) from future.exception()
            return future.result()

    def _describe_lost_worker(self) -> str:
        # The connection may break a moment before the process is gone.
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._worker.is_alive and time.monotonic() < deadline:
            time.sleep(_WATCH_SECONDS / 10)
        return self._worker.describe_end()


def _with_lists(argument: Any) -> Any:
    """The argument with clients' values as TFF's own executors take them."""
    if isinstance(argument, ClientValues):
        return list(argument)
    if isinstance(argument, _tff.Struct):
        return _tff.Struct([(name, _with_lists(member)) for name, member in _tff.to_elements(argument)])
    return argument


def _is_done(future: concurrent.futures.Future[Any], timeout_seconds: float) -> bool:
    return bool(concurrent.futures.wait([future], timeout=timeout_seconds).done)


def _is_lost_connection(error: BaseException | None) -> bool:
    return (
        isinstance(error, grpc.RpcError)
        and isinstance(error, grpc.Call)
        and error.code() == grpc.StatusCode.UNAVAILABLE
    )


class _Executors(_tff.ExecutorFactory):
    """The worker's executors, one per number of clients, of which the least recently used is closed.

    TFF's factory forgets an executor without closing it, and the worker then keeps it for ever. Cohorts drawn by
    Poisson sampling have another size every round.
    """

    def __init__(self, stub: WorkerStub):
        self._stub = stub
        self._executors: OrderedDict[int, _tff.RemoteExecutor] = OrderedDict()

    def create_executor(self, cardinalities: Any) -> _tff.RemoteExecutor:
        """The executor for this number of clients; none of its values outlives an invocation."""
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
