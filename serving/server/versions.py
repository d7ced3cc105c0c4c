"""Loads the versions that a policy chooses, and keeps the states of versions and the table of served versions.

`VersionLoader` loads missing versions, and remembers versions that fail. A `ModelTable` is immutable: a new table
replaces it when models or versions change. `StatusBoard` has the states of versions, named as in TensorFlow Serving.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

import grpc

from serving.errors import RequestError, invalid_argument
from serving.saved_model import layout
from serving.saved_model.layout import ModelSpec
from serving.saved_model.servable import Servable
from serving.server.loaded_version import LoadedVersion
from serving.server.metrics import Metrics
from serving.server.options import BatchingOptions
from serving.tf_serving import ServedModel
from tff_pdp.errors import ServingError

Versions = Mapping[int, LoadedVersion]


class ModelTable:
    """The served models, in their given order, and their loaded versions, by model name and version number."""

    def __init__(self, models: Sequence[ServedModel], versions: Mapping[str, Versions]):
        self.models = tuple(models)
        self.versions = {model.name: versions[model.name] for model in models}
        self._by_name = {model.name: model for model in models}

    def find(self, spec: ModelSpec) -> LoadedVersion:
        """Returns the version that a request asks for.

        Raises:
          RequestError: INVALID_ARGUMENT if `spec` has no name or an unknown label; NOT_FOUND if the version is not
            loaded.
        """
        if not spec.name:
            raise invalid_argument("ModelSpec has no name specified.")
        version = spec.version
        if spec.label is not None:
            model = self._by_name.get(spec.name)
            if model is None or spec.label not in model.labels:
                raise invalid_argument(f"Unrecognized servable version label: {spec.label}")
            version = model.labels[spec.label]
        versions = self.versions.get(spec.name, {})
        number = max(versions, default=None) if version is None else version
        if number is None or number not in versions:
            wanted = f"Latest({spec.name})" if version is None else f"Specific({spec.name}, {version})"
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"Servable not found for request: {wanted}")
        return versions[number]

    def reusable_versions(self, model: ServedModel) -> Versions:
        """Returns this table's loaded versions of `model`; none if the model is missing or has another folder."""
        known = self._by_name.get(model.name)
        return self.versions[model.name] if known is not None and known.base_path == model.base_path else {}

    def lacking(self, other: "ModelTable") -> list[LoadedVersion]:
        """Returns the versions in `other` that this table lacks; a version loaded a second time is a different one."""
        held = {id(version) for version in self.loaded()}
        return [version for version in other.loaded() if id(version) not in held]

    def loaded(self) -> list[LoadedVersion]:
        """Returns the loaded versions of all models."""
        return [version for versions in self.versions.values() for version in versions.values()]

    def check_labels(self, models: Sequence[ServedModel]) -> None:
        """Checks that each label in `models` names a loaded version in this table.

        Raises:
          RequestError: FAILED_PRECONDITION if a version is not loaded; the message names the first one.
        """
        for model in models:
            for version in model.labels.values():
                if version not in self.versions.get(model.name, {}):
                    raise RequestError(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"Request to assign label to version {version} of model {model.name}, which is not currently "
                        "available for inference",
                    )


START, LOADING, AVAILABLE, UNLOADING, END = "START", "LOADING", "AVAILABLE", "UNLOADING", "END"


@dataclasses.dataclass(frozen=True)
class VersionStatus:
    """State of a version (`START`, `LOADING`, `AVAILABLE`, `UNLOADING`, `END`); `error` is the cause of a failure."""

    version: int
    state: str
    error: str = ""


class StatusBoard:
    """The latest state of every version ever seen, including versions that have ended. Many threads may use it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._statuses: dict[str, dict[int, VersionStatus]] = {}

    def set(self, name: str, version: int, state: str, error: str = "") -> None:
        """Records the state of one version."""
        with self._lock:
            self._statuses.setdefault(name, {})[version] = VersionStatus(version, state, error)

    def end_unloading(self, name: str, version: int) -> None:
        """Records that a version has been freed, unless a version with this number is being loaded or used again."""
        with self._lock:
            if self._statuses[name][version].state == UNLOADING:
                self._statuses[name][version] = VersionStatus(version, END)

    def get(self, name: str, version: int | None = None) -> list[VersionStatus]:
        """Returns the state of one version, or the states of all versions of a model, newest first.

        Raises:
          RequestError: NOT_FOUND if the model or the version has never been seen.
        """
        found = [status for status in self._newest_first(name) if version in (None, status.version)]
        if not found:
            wanted = "any versions" if version is None else f"version {version}"
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"Could not find {wanted} of model {name}")
        return found

    def errors(self, name: str) -> list[str]:
        """Returns the error messages of a model's failed versions, newest version first."""
        return [status.error for status in self._newest_first(name) if status.error]

    def _newest_first(self, name: str) -> list[VersionStatus]:
        with self._lock:
            return sorted(self._statuses.get(name, {}).values(), key=lambda status: status.version, reverse=True)


_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class VersionLoader:
    """Loads versions in threads, several at a time. Only one thread at a time may call the loader.

    A version that does not load is treated as missing, and is not tried again until its files change. So the policy
    `Latest(1)` serves the newest version that loads. (TensorFlow Serving tries a version five times, once a minute;
    meanwhile it serves the old version, or none after a restart.)

    Attributes:
      load_export: function that checks, loads and warms up one export.
      load_executor: executor whose threads load exports.
      run_executor: executor whose threads run the requests of loaded versions.
      batching: options for merging requests; None to run each request on its own.
      statuses: board where the loader enters the states `START`, `LOADING` and, after a failure, `END`.
      metrics: counters of attempts to load, and of batches.
    """

    load_export: Callable[[Path], Servable]
    load_executor: Executor
    run_executor: Executor
    batching: BatchingOptions | None
    statuses: StatusBoard
    metrics: Metrics
    _refused: dict[Path, frozenset] = dataclasses.field(default_factory=dict, init=False)

    def bring_up(
        self, models: Sequence[ServedModel], found: Mapping[str, Mapping[int, Path]], loaded: Mapping[str, Versions]
    ) -> dict[str, Versions]:
        """Loads missing versions, and returns the versions to serve from now on, by model name and version number.

        `found` has the folders of the versions on disk, and `loaded` has the versions that are served now; both are by
        model name and version number. The result may have no version of a model.
        """
        tables = {model.name: dict(loaded.get(model.name, {})) for model in models}
        candidates = {
            model.name: {
                version: path
                for version, path in found[model.name].items()
                if version in tables[model.name] or path not in self._refused or self._refused[path] != _snapshot(path)
            }
            for model in models
        }
        # An older version replaces a version that fails, so the missing versions are computed again. Each version is
        # tried once, even if its files change meanwhile: a copy that grows is left alone until the next look.
        while missing := [
            (model.name, version, candidates[model.name][version])
            for model in models
            for version in sorted(model.policy.choose(candidates[model.name]), reverse=True)
            if version not in tables[model.name]
        ]:
            for (name, version, _), servable in zip(missing, self._load_all(missing), strict=True):
                if servable is None:
                    del candidates[name][version]
                else:
                    tables[name][version] = self._loaded(name, version, candidates[name][version], servable)
        return {
            model.name: _kept(model, found[model.name], candidates[model.name], tables[model.name]) for model in models
        }

    def _loaded(self, name: str, version: int, export_dir: Path, servable: Servable) -> LoadedVersion:
        return LoadedVersion(
            name,
            version,
            servable,
            executor=self.run_executor,
            batching=self.batching,
            on_batch=functools.partial(self.metrics.batch_ran, name),
            has_hashed_ids=_has_hashed_ids(export_dir),
        )

    def _load_all(self, exports: Sequence[tuple[str, int, Path]]) -> list[Servable | None]:
        """Loads exports of models and versions; returns None for each that does not load, and remembers its files."""
        for name, version, _ in exports:
            self.statuses.set(name, version, START)
        snapshots = [_snapshot(export_dir) for _, _, export_dir in exports]
        servables = list(self.load_executor.map(self._load, *zip(*exports, strict=True)))
        for (_, _, export_dir), snapshot, servable in zip(exports, snapshots, servables, strict=True):
            if servable is None:
                self._refused[export_dir] = snapshot
        return servables

    def _load(self, name: str, version: int, export_dir: Path) -> Servable | None:
        """Runs in a thread: returns None, and says why in the version's status, if the export does not load."""
        self.statuses.set(name, version, LOADING)
        start = time.monotonic()
        servable, reason = None, ""
        try:
            servable = self.load_export(export_dir)
        except ServingError as error:
            reason = str(error)
        # Files may vanish during the load; a failure of one version must not stop the others.
        except Exception as error:
            _LOGGER.exception("Loading %s failed.", export_dir)
            reason = f"{export_dir} does not load: {error}"
        if servable is None:
            self.statuses.set(name, version, END, reason)
            _LOGGER.warning("Version %d of %s is refused: %s", version, name, reason)
        self.metrics.load_attempt(name, version, servable is not None, time.monotonic() - start)
        return servable


def _has_hashed_ids(export_dir: Path) -> bool:
    """Checks if an export knows clients by hashes of their ids; false for exports of others, which have no card."""
    with contextlib.suppress(ServingError):
        return layout.read_document(export_dir, layout.MODEL_CARD_FILE).get("client_id_kind") == "hashed"
    return False


def _snapshot(export_dir: Path) -> frozenset:
    """Returns names, sizes and times of a version's files, to notice a copy that is still growing."""
    found = set()
    for path in export_dir.rglob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        found.add((str(path), stat.st_size, stat.st_mtime_ns))
    return frozenset(found)


def _kept(model: ServedModel, found: Iterable[int], candidates: Iterable[int], versions: Versions) -> Versions:
    """Leaves out versions that the policy no longer asks for, like TensorFlow Serving's `AvailabilityPreservingPolicy`.

    A version whose folder is gone ends, even the last one. While none of the versions that the policy asks for loads,
    the newest loaded version goes on.
    """
    kept = {version: versions[version] for version in model.policy.choose(candidates)}
    if not kept and versions and model.policy.choose(found):
        newest = max(versions)
        return {newest: versions[newest]}
    return kept
