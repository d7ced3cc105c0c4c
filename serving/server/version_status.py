"""What became of every version: the states that TensorFlow Serving reports."""

import dataclasses
import threading

import grpc

from serving.errors import RequestError

START, LOADING, AVAILABLE, UNLOADING, END = "START", "LOADING", "AVAILABLE", "UNLOADING", "END"


@dataclasses.dataclass(frozen=True)
class VersionStatus:
    """State of one version, in TensorFlow Serving's terms.

    Attributes:
      version: the version number.
      state: `START`, `LOADING`, `AVAILABLE`, `UNLOADING` or `END`.
      error: why the version ended, or empty.
    """

    version: int
    state: str
    error: str = ""


class StatusBoard:
    """The latest state of every version ever seen, ended ones included. Safe to call from many threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._statuses: dict[str, dict[int, VersionStatus]] = {}

    def set(self, name: str, version: int, state: str, error: str = "") -> None:
        """Records the state of one version."""
        with self._lock:
            self._statuses.setdefault(name, {})[version] = VersionStatus(version, state, error)

    def end_unloading(self, name: str, version: int) -> None:
        """Records that a version has been freed; nothing if its number is in use again, or on its way to be."""
        with self._lock:
            if self._statuses[name][version].state == UNLOADING:
                self._statuses[name][version] = VersionStatus(version, END)

    def get(self, name: str, version: int | None = None) -> list[VersionStatus]:
        """Returns the states of one version, or of all of a model, newest first.

        Raises:
          RequestError: NOT_FOUND for a model or version never seen.
        """
        with self._lock:
            known = dict(self._statuses.get(name, {}))
        if version is not None:
            if version not in known:
                raise RequestError(grpc.StatusCode.NOT_FOUND, f"Could not find version {version} of model {name}")
            return [known[version]]
        if not known:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"Could not find any versions of model {name}")
        return [known[number] for number in sorted(known, reverse=True)]

    def errors(self, name: str) -> list[str]:
        """Returns why versions of a model ended, newest first."""
        with self._lock:
            known = dict(self._statuses.get(name, {}))
        return [known[number].error for number in sorted(known, reverse=True) if known[number].error]
