"""An embedded server for development, tests and demonstrations. In production, run TensorFlow Serving itself."""

import contextlib
import threading
from pathlib import Path
from types import TracebackType

from serving import layout
from serving.grpc_service import running_grpc_server
from serving.manager import ModelManager
from serving.rest import RestServer

DEFAULT_MAX_BYTES = 64 * 2**20
DEFAULT_MAX_ELEMENTS = 16 * 2**20


class EmbeddedServer:
    """Serves the newest good version of one model over TensorFlow Serving's REST and gRPC APIs.

    Use it as a context manager, or call `start` and `stop`. A version exported while it runs is picked up within
    `poll_seconds`; one that does not load is reported in the model status, and the old one goes on.

    There is no authentication and no encryption: it listens on the loopback address unless told otherwise.

    Example:
      with EmbeddedServer("exports/femnist", "femnist") as server:
          print(server.banner)
          server.wait()

    Attributes:
      model_name: the name requests use.
      host: the address listened on.
      rest_port: the REST port; while the server runs, the one it got.
      grpc_port: the gRPC port; while the server runs, the one it got.
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
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_elements: int = DEFAULT_MAX_ELEMENTS,
    ):
        """Does not start anything yet.

        Args:
          base_path: directory of the model's versions, as `export_personalized` writes it.
          model_name: the name requests use.
          rest_port: port of the REST API; 0 picks a free one.
          grpc_port: port of the gRPC API; 0 picks a free one.
          host: address to listen on.
          poll_seconds: how often to look for a new version.
          max_bytes: largest request accepted; a larger REST body is answered with 413.
          max_elements: most elements in one gRPC input tensor.

        Raises:
          ServingError: if the model name cannot be served.
        """
        layout.check_model_name(model_name)
        self.model_name = model_name
        self.host = host
        self.rest_port = rest_port
        self.grpc_port = grpc_port
        self._base_path = Path(base_path)
        self._poll_seconds = poll_seconds
        self._max_bytes = max_bytes
        self._max_elements = max_elements
        self._running = contextlib.ExitStack()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Takes the ports, loads the newest good version and starts to answer.

        Raises:
          ServingError: if a port is taken or no version loads; nothing is left running then.
        """
        with contextlib.ExitStack() as starting:
            manager = ModelManager(self._base_path, self.model_name, self._poll_seconds)
            # Ports first: a taken one is found out before a long load.
            rest = RestServer(manager, self.host, self.rest_port, self._max_bytes)
            starting.callback(rest.server_close)
            grpc_server, grpc_port = starting.enter_context(
                running_grpc_server(
                    manager, self.host, self.grpc_port, max_bytes=self._max_bytes, max_elements=self._max_elements
                )
            )
            manager.load()
            grpc_server.start()
            thread = threading.Thread(target=rest.serve_forever, args=(0.1,), name="rest", daemon=True)
            thread.start()
            starting.callback(thread.join)
            starting.callback(rest.shutdown)
            manager.start_watching()
            starting.callback(manager.stop)
            self.rest_port, self.grpc_port = rest.server_address[1], grpc_port
            self._stopped.clear()
            self._running = starting.pop_all()

    def stop(self) -> None:
        """Lets running requests finish, closes the ports and joins every thread; harmless if already stopped."""
        self._running.close()
        self._stopped.set()

    def wait(self) -> None:
        """Blocks until another thread calls `stop`, or Ctrl-C is pressed, which it turns into a normal return."""
        with contextlib.suppress(KeyboardInterrupt):
            self._stopped.wait()

    @property
    def banner(self) -> str:
        """What to tell the person who started it: addresses, and what this server is not."""
        return (
            f"Serving {self.model_name} from {self._base_path}\n"
            f"  REST  http://{self.host}:{self.rest_port}/v1/models/{self.model_name}\n"
            f"  gRPC  {self.host}:{self.grpc_port}\n"
            "This is a development server without authentication. In production, serve the same files with TensorFlow "
            "Serving."
        )

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
