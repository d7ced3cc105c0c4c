"""Runs a development server inside this process; in production, run TensorFlow Serving."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

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
_DEFAULT_BATCHING = BatchingOptions()


class EmbeddedServer:
    """Serves models over TensorFlow Serving's REST and gRPC APIs, on one event loop in a thread of its own.

    Use it as a context manager, or call `start` and `stop`. A version exported while it runs is picked up within
    `poll_seconds`; one that does not load is reported in the model status, and the old one goes on.

    There is no authentication and no encryption; the default address is the loopback address.

    Example:
      with EmbeddedServer("exports/femnist", "femnist") as server:
          print(server.banner)
          server.wait()

    Attributes:
      models: the models served from the start.
      host: the address listened on.
      rest_port: the REST port, a free one in place of 0 while the server runs.
      grpc_port: the gRPC port, likewise.
    """

    def __init__(
        self,
        base_path: str | Path,
        model_name: str,
        rest_port: int = 0,
        grpc_port: int = 0,
        host: str = "127.0.0.1",
        *,
        poll_seconds: float = 1.0,
        batching: BatchingOptions | None = _DEFAULT_BATCHING,
        max_bytes: int = Limits.max_bytes,
        max_elements: int = Limits.max_elements,
        timeout_seconds: float = Limits.timeout_seconds,
    ):
        """Serves the newest good version of one model. Does not start anything yet.

        Args:
          base_path: directory of the model's versions, as exports are written.
          model_name: the name requests use.
          rest_port: port of the REST API; 0 picks a free one.
          grpc_port: port of the gRPC API; 0 picks a free one.
          host: address to listen on.
          poll_seconds: how often to look for new versions; 0 for only at the start.
          batching: how requests that wait for the model are merged; None to run each on its own.
          max_bytes: largest request accepted; a larger REST body is answered with 413.
          max_elements: most elements in one gRPC input tensor.
          timeout_seconds: how long a REST client may take to send a request or to take its answer.

        Raises:
          ServingError: if the model name cannot be served, or a limit is not positive.
        """
        layout.check_model_name(model_name)
        self.models: Sequence[ServedModel] = (ServedModel(model_name, Path(base_path)),)
        self.host = host
        self.rest_port = rest_port
        self.grpc_port = grpc_port
        self._poll_seconds = poll_seconds
        self._batching = batching
        self._limits = Limits(max_bytes, max_elements, timeout_seconds)
        self._running = contextlib.ExitStack()
        self._stopped = threading.Event()

    @classmethod
    def of_models(cls, models: Sequence[ServedModel], **options: Any) -> "EmbeddedServer":
        """Serves several models. Does not start anything yet.

        Args:
          models: the models to serve, such as those of `read_model_config_file`.
          **options: those of the constructor.

        Raises:
          ServingError: if there is no model, two have the same name, or a name cannot be served.
        """
        names = [model.name for model in models]
        if not names:
            raise ServingError("There is no model to serve: name at least one.")
        for name in names:
            layout.check_model_name(name)
            if names.count(name) > 1:
                raise ServingError(f"Two models are called {name!r}: give each its own name.")
        server = cls(models[0].base_path, names[0], **options)
        server.models = tuple(models)
        return server

    def start(self) -> None:
        """Takes the ports, loads the newest good versions and starts to answer.

        Raises:
          ServingError: if a port is taken or a model has no version that loads; nothing is left running then.
        """
        with contextlib.ExitStack() as starting:
            # Ports first: a taken one is found out before a long load, and gRPC would print lines of its own.
            listening = starting.enter_context(_bind("REST", self.host, self.rest_port))
            _bind("gRPC", self.host, self.grpc_port).close()
            metrics = Metrics()
            manager = ModelManager(
                self.models, poll_seconds=self._poll_seconds, metrics=metrics, batching=self._batching
            )
            starting.callback(manager.stop)
            manager.load()
            grpc_port = starting.enter_context(self._answering(manager, metrics, listening))
            manager.start_watching()
            self.rest_port, self.grpc_port = listening.getsockname()[1], grpc_port
            self._stopped.clear()
            self._running = starting.pop_all()

    def stop(self) -> None:
        """Lets running requests finish, closes the ports and joins every thread; does nothing if already stopped."""
        self._running.close()
        self._stopped.set()

    def wait(self) -> None:
        """Blocks until another thread calls `stop`, or Ctrl-C is pressed, which is a normal return."""
        with contextlib.suppress(KeyboardInterrupt):
            self._stopped.wait()

    @property
    def banner(self) -> str:
        """Tells the person who started the server its addresses, and that it is not for production."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @contextlib.contextmanager
    def _answering(self, manager: ModelManager, metrics: Metrics, listening: socket.socket) -> Iterator[int]:
        """Runs both protocols in a thread while the block runs, then lets requests finish; yields the gRPC port."""
        started: Future[_Started] = Future()
        answering = self._answer(manager, metrics, listening, started)
        thread = threading.Thread(target=_run_loop, args=(answering, started), name="serving", daemon=True)
        thread.start()
        try:
            yield started.result().grpc_port
        finally:
            # After Ctrl-C, the server starts all the same and must be ended.
            with contextlib.suppress(Exception):
                started.result().end()
            thread.join()

    async def _answer(
        self, manager: ModelManager, metrics: Metrics, listening: socket.socket, started: "Future[_Started]"
    ) -> None:
        """Runs both protocols until the loop is told to end."""
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(_log_loop_failure)
        async with (
            running_grpc_server(manager, metrics, self.host, self.grpc_port, self._limits) as grpc_port,
            running_rest_server(RestApi(manager, self._limits), metrics, listening, self._limits),
        ):
            started.set_result(_Started(grpc_port, lambda: loop.call_soon_threadsafe(stopping.set)))
            await stopping.wait()


class _Started(NamedTuple):
    """A server that answers, and how to end it."""

    grpc_port: int
    end: Callable[[], object]


def _bind(protocol: str, host: str, port: int) -> socket.socket:
    """Takes a port, where requests wait until a server listens."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ServingError(
            f"{protocol} port {port} on {host} cannot be used ({reason}); choose another, or 0."
        ) from error


def _run_loop(answering: Coroutine[Any, Any, None], started: "Future[_Started]") -> None:
    try:
        asyncio.run(answering)
    except BaseException as error:
        # Before it started, the caller waits for this; afterwards nobody does.
        if started.done():
            raise
        started.set_exception(error)


def _log_loop_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    # gRPC wakes all loops of a process for the events of any; those that find nothing left to read are no failure.
    if isinstance(error, BlockingIOError) and "PollerCompletionQueue" in str(context.get("handle")):
        return
    if error is None:
        loop.default_exception_handler(context)
    else:
        log_failure(_LOGGER, "The event loop", error)
