"""Which version answers: loads the newest, watches for newer ones, and keeps the old one when a new one is bad."""

import dataclasses
import logging
import threading
from pathlib import Path

import grpc

from serving import layout
from serving.errors import RequestError
from serving.loader import Servable, load_servable
from tff_pdp.errors import ServingError

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class VersionStatus:
    """State of one version, in TensorFlow Serving's terms.

    Attributes:
      version: the version number.
      state: `LOADING`, `AVAILABLE` or `END`.
      error: why the version ended, or empty.
    """

    version: int
    state: str
    error: str = ""


class ModelManager:
    """Holds the one version of one model that takes traffic. Safe to call from many threads.

    Attributes:
      model_name: the name requests use.
    """

    def __init__(self, base_path: Path, model_name: str, poll_seconds: float):
        """Does not touch the disk yet; see `load`.

        Args:
          base_path: directory of the model's versions.
          model_name: the name requests use.
          poll_seconds: how often to look for a new version.
        """
        self.model_name = model_name
        self._base_path = base_path
        self._poll_seconds = poll_seconds
        self._lock = threading.Lock()
        self._current: tuple[int, Servable] | None = None
        self._statuses: dict[int, VersionStatus] = {}
        self._refused: dict[int, frozenset] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="version-watcher", daemon=True)

    def load(self) -> None:
        """Loads the newest good version.

        Raises:
          ServingError: if there is no version, or none loads.
        """
        self._refresh()
        if self._current is None:
            reasons = [status.error for status in self._statuses.values() if status.error]
            raise ServingError(
                f"No version of {self.model_name!r} under {self._base_path} can be served. "
                + (" ".join(reasons) or "Export a model there first.")
            )

    def start_watching(self) -> None:
        """Starts the thread that looks for new versions."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the watching thread and waits for it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def servable(self, model_name: str, version: int | None = None) -> tuple[int, Servable]:
        """Returns the version that answers a request, and its number.

        Raises:
          RequestError: NOT_FOUND for another model or version; INVALID_ARGUMENT for an empty name.
        """
        if not model_name:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, "ModelSpec has no name specified.")
        current = self._current
        if current is None or model_name != self.model_name or version not in (None, current[0]):
            wanted = f"Latest({model_name})" if version is None else f"Specific({model_name}, {version})"
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"Servable not found for request: {wanted}")
        return current

    def statuses(self, model_name: str, version: int | None = None) -> list[VersionStatus]:
        """Returns the states of the versions seen so far, newest first.

        Raises:
          RequestError: NOT_FOUND for another model, or a version never seen.
        """
        with self._lock:
            known = dict(self._statuses) if model_name == self.model_name else {}
        if not known:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"Could not find any versions of model {model_name}")
        if version is None:
            return [known[number] for number in sorted(known, reverse=True)]
        if version not in known:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"Could not find version {version} of model {model_name}")
        return [known[version]]

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                self._refresh()
            except ServingError as error:
                # The directory may be gone for a moment, for instance while a volume is mounted again.
                _LOGGER.warning("%s Still serving the loaded version.", error)

    def _refresh(self) -> None:
        """Serves the newest version that loads; a version that failed is tried again only if its files changed."""
        for version, export_dir in reversed(layout.published_versions(self._base_path).items()):
            if self._current is not None and version == self._current[0]:
                return
            snapshot = _snapshot(export_dir)
            if self._refused.get(version) == snapshot:
                continue
            self._set_status(VersionStatus(version, "LOADING"))
            try:
                servable = load_servable(export_dir)
            except ServingError as error:
                self._refused[version] = snapshot
                self._set_status(VersionStatus(version, "END", str(error)))
                _LOGGER.warning("Version %d of %s is refused: %s", version, self.model_name, error)
                continue
            self._replace(version, servable)
            return

    def _replace(self, version: int, servable: Servable) -> None:
        """Puts a loaded version in place; requests that hold the old one finish on it."""
        previous = self._current
        self._current = (version, servable)
        self._set_status(VersionStatus(version, "AVAILABLE"))
        if previous is not None:
            self._set_status(VersionStatus(previous[0], "END"))
        _LOGGER.info("Serving version %d of %s.", version, self.model_name)

    def _set_status(self, status: VersionStatus) -> None:
        with self._lock:
            self._statuses[status.version] = status


def _snapshot(export_dir: Path) -> frozenset:
    """What a version's files look like from outside, to notice a copy that is still growing."""
    found = set()
    for path in export_dir.rglob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        found.add((str(path), stat.st_size, stat.st_mtime_ns))
    return frozenset(found)
