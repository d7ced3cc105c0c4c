"""Runs a development server inside this process; in production, run TensorFlow Serving."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from serving.errors import log_failure
from serving.saved_model import layout
from serving.server.grpc_server import running_grpc_server
from serving.server.manager import ModelManager
from serving.server.metrics import Metrics
from serving.server.options import BatchingOptions, Limits
from serving.server.rest_api import RestApi
from serving.server.rest_server import running_rest_server
from serving.tf_serving import METRICS_PATH, ServedModel
from tff_pdp.errors import ServingError

_LOGGER = logging.getLogger(__name__)
# The gRPC port of a running server, and a function that ends the server.
_Started = tuple[int, Callable[[], object]]


@dataclasses.dataclass(eq=False)
class EmbeddedServer:
    """Serves models over TensorFlow Serving's REST and gRPC APIs, on one event loop in a thread of its own.

    Use it as a context manager, or call `start` and `stop`. The running server searches for new versions every
    `poll_seconds`. If a new version does not load, its status has the reason, and the old version stays in use.

    The server has no authentication and no encryption. By default it listens on the loopback address only.

    Example:
      with EmbeddedServer([ServedModel("femnist", Path("exports/femnist"))]) as server:
          print(server.banner)
          server.wait()

    Attributes:
      models: models to serve from the start.
      rest_port: port of the REST API; 0 for any free port, whose number replaces the 0 when the server starts.
      grpc_port: port of the gRPC API; 0 for any free port, as in `rest_port`.
      host: address to listen on.
      poll_seconds: seconds between two searches for new versions; 0 to search only at the start.
      batching: options for merging requests that wait for the model; None to run each request on its own.
      limits: limits on requests.

    Raises:
      ServingError: no model is given, two models have the same name, or a model name is not valid in URLs.
    """

    models: Sequence[ServedModel]
    rest_port: int = 0
    grpc_port: int = 0
    host: str = "127.0.0.1"
    poll_seconds: float = 1.0
    batching: BatchingOptions | None = dataclasses.field(default_factory=BatchingOptions)
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self):
        names = [model.name for model in self.models]
        if not names:
            raise ServingError("There is no model to serve: name at least one.")
        for name in names:
            layout.check_model_name(name)
            if names.count(name) > 1:
                raise ServingError(f"Two models are called {name!r}: give each its own name.")
        self._running = contextlib.ExitStack()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Opens the ports, loads each model's versions, and starts to answer requests.

        Raises:
          ServingError: a port is in use, a model has no version that loads, or a label names a version that is not
            served. The server is then stopped again.
        """
        with contextlib.ExitStack() as starting:
            # Ports first: a taken port is reported before a long load, and gRPC would print lines of its own.
            listening = starting.enter_context(_bind("REST", self.host, self.rest_port))
            _bind("gRPC", self.host, self.grpc_port).close()
            metrics = Metrics()
            manager = ModelManager(self.models, poll_seconds=self.poll_seconds, metrics=metrics, batching=self.batching)
            starting.callback(manager.stop)
            manager.load()
            grpc_port = starting.enter_context(self._answering(manager, metrics, listening))
            manager.start_watching()
            self.rest_port, self.grpc_port = listening.getsockname()[1], grpc_port
            self._stopped.clear()
            self._running = starting.pop_all()

    def stop(self) -> None:
        """Waits for running requests, closes the ports and ends all threads; a second call does nothing."""
        self._running.close()
        self._stopped.set()

    def wait(self) -> None:
        """Waits until another thread calls `stop` or Ctrl-C is pressed; returns without an error in both cases."""
        with contextlib.suppress(KeyboardInterrupt):
            self._stopped.wait()

    @property
    def banner(self) -> str:
        """Returns a text for the person who starts the server: its addresses, and a warning against production use."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return "\n".join(
            [
                *(f"Serving {model.name} from {model.base_path}" for model in self.models),
                *(f"  REST  http://{host}:{self.rest_port}/v1/models/{model.name}" for model in self.models),
                f"  gRPC  {host}:{self.grpc_port}",
                f"  metrics  http://{host}:{self.rest_port}{METRICS_PATH}",
                "This is a development server without authentication. In production, serve the same files with "
                "TensorFlow Serving.",
            ]
        )

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextlib.contextmanager
    def _answering(self, manager: ModelManager, metrics: Metrics, listening: socket.socket) -> Iterator[int]:
        """Runs both protocols in a thread while the block runs, then lets requests finish; yields the gRPC port."""
        started: Future[_Started] = Future()
        answering = self._answer(manager, metrics, listening, started)
        thread = threading.Thread(target=_run_loop, args=(answering, started), name="serving", daemon=True)
        thread.start()
        try:
            yield started.result()[0]
        finally:
            # After Ctrl-C, the server starts all the same and must be ended.
            with contextlib.suppress(Exception):
                started.result()[1]()
            thread.join()

    async def _answer(
        self, manager: ModelManager, metrics: Metrics, listening: socket.socket, started: "Future[_Started]"
    ) -> None:
        """Runs both protocols until the loop is told to end."""
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(_log_loop_failure)
        async with (
            running_grpc_server(manager, metrics, self.host, self.grpc_port, self.limits) as grpc_port,
            running_rest_server(RestApi(manager, self.limits), metrics, listening, self.limits),
        ):
            started.set_result((grpc_port, lambda: loop.call_soon_threadsafe(stopping.set)))
            await stopping.wait()


def _bind(protocol: str, host: str, port: int) -> socket.socket:
    """Takes a port, where requests wait until a server listens."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ServingError(
            f"{protocol} port {port} on {host} cannot be used ({reason}); choose another, or 0 (any)."
        ) from error


def _run_loop(answering: Coroutine[Any, Any, None], started: "Future[_Started]") -> None:
    try:
        asyncio.run(answering)
    except BaseException as error:
        # Before the server has started, the caller waits for this error; afterwards nobody does.
        if started.done():
            raise
        started.set_exception(error)


def _log_loop_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    # gRPC wakes all loops of a process for an event of one loop; it is no failure if the others find nothing to read.
    if isinstance(error, BlockingIOError) and "PollerCompletionQueue" in str(context.get("handle")):
        return
    if error is None:
        loop.default_exception_handler(context)
    else:
        log_failure(_LOGGER, "The event loop", error)
