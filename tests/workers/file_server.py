"""A file server for tests: a folder, by the part of the WebHDFS protocol that fsspec uses.

Processes reach the files by an fsspec URL alone, as they do in a store of a cloud.
"""

import collections
import contextlib
import http.server
import json
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "/webhdfs/v1"


class FileServer(http.server.ThreadingHTTPServer):
    """Serves one folder.

    Attributes:
      requests: number of requests by operation and path.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: collections.Counter[tuple[str, str]] = collections.Counter()

    @property
    def url(self) -> str:
        """The fsspec URL of the folder."""
        return f"webhdfs://127.0.0.1:{self.server_port}"

    def count(self, operation: str, part_of_path: str) -> int:
        """How often an operation was asked for, on paths that contain this text."""
        return sum(
            number for (asked, path), number in self.requests.items() if asked == operation and part_of_path in path
        )


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """Serves a folder inside the `with` block."""
    with FileServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"
    # Headers and content are two packets, which the kernel would otherwise delay.
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        asked = {name: values[0] for name, values in urllib.parse.parse_qs(parts.query).items()}
        path = urllib.parse.unquote(parts.path).removeprefix(_PREFIX)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        operation = asked["op"]
        self.server.requests[operation, path] += 1
        file = self.server.folder / path.lstrip("/")
        if operation in ("CREATE", "APPEND") and "data" not in asked:
            # The server of names sends clients on to a server of data, which is the same one here.
            self._answer(307, b"", {"Location": f"http://{self.headers['Host']}{self.path}&data=true"})
        elif operation == "MKDIRS":
            file.mkdir(parents=True, exist_ok=True)
            self._answer_json({"boolean": True})
        elif operation in ("CREATE", "APPEND"):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb" if operation == "CREATE" else "ab") as opened:
                opened.write(content)
            self._answer(201 if operation == "CREATE" else 200, b"")
        elif not file.exists():
            message = {"exception": "FileNotFoundException", "message": f"File does not exist: {path}"}
            self._answer_json({"RemoteException": message}, 404)
        elif operation == "OPEN":
            with file.open("rb") as opened:
                opened.seek(int(asked.get("offset", 0)))
                self._answer(200, opened.read(int(asked.get("length", -1))))
        elif operation == "GETFILESTATUS":
            self._answer_json({"FileStatus": _status(file, "")})
        elif operation == "LISTSTATUS":
            self._answer_json(
                {"FileStatuses": {"FileStatus": [_status(one, one.name) for one in sorted(file.iterdir())]}}
            )
        elif operation == "DELETE":
            shutil.rmtree(file) if file.is_dir() else file.unlink()
            self._answer_json({"boolean": True})
        else:
            message = {"exception": "UnsupportedOperationException", "message": operation}
            self._answer_json({"RemoteException": message}, 400)

    do_GET = do_PUT = do_POST = do_DELETE = _handle

    def _answer_json(self, content: object, status: int = 200) -> None:
        self._answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing: a test's output is its own."""


def _status(file: Path, suffix: str) -> dict[str, object]:
    is_folder = file.is_dir()
    return {
        "pathSuffix": suffix,
        "type": "DIRECTORY" if is_folder else "FILE",
        "length": 0 if is_folder else file.stat().st_size,
    }
