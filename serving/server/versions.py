"""Bringing up the versions that a policy asks for: loads what is missing, remembers what did not load."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from serving.saved_model.servable import Servable
from serving.server import version_status
from serving.server.loaded_version import LoadedVersion
from serving.server.model_table import Versions
from serving.server.options import BatchingOptions
from serving.server.version_status import StatusBoard
from serving.tf_serving import ServedModel
from tff_pdp.errors import ServingError

_LOGGER = logging.getLogger(__name__)


class Events(Protocol):
    """What a manager reports as it happens, for metrics. Called from the threads that load and that run requests."""

    def load_attempt(self, name: str, version: int, ok: bool, seconds: float) -> None:
        """A version was loaded, or failed to, after so many seconds, warm-up included."""

    def batch_ran(self, name: str, request_sizes: Sequence[int], num_examples: int) -> None:
        """A batch of requests of these many examples was run, of so many examples with padding."""


class VersionLoader:
    """Loads versions in threads of its own, several at a time. Its callers take turns: it is not thread-safe.

    A version that does not load is not tried again until its files change, and counts as if it were not there: with
    the policy `Latest(1)`, the newest version that loads is served. (TensorFlow Serving keeps the old version too as
    long as it runs, but started afresh it would serve none; and it tries a version five times, a minute apart, before
    it gives up.)
    """

    def __init__(
        self,
        load_export: Callable[[Path], Servable],
        *,
        load_executor: Executor,
        run_executor: Executor,
        batching: BatchingOptions | None,
        statuses: StatusBoard,
        events: Events | None,
    ):
        """Loads nothing yet.

        Args:
          load_export: checks, loads and warms up one export.
          load_executor: threads that load.
          run_executor: threads that will run the requests of what is loaded.
          batching: how these are merged.
          statuses: where states are recorded up to `LOADING`, or `END` after a failure.
          events: whom to tell of every attempt, and of every batch.
        """
        self._load_export = load_export
        self._load_executor = load_executor
        self._run_executor = run_executor
        self._batching = batching
        self._statuses = statuses
        self._events = events
        self._refused: dict[Path, frozenset] = {}

    def bring_up(
        self, models: Sequence[ServedModel], found: Mapping[str, Mapping[int, Path]], loaded: Mapping[str, Versions]
    ) -> dict[str, Versions]:
        """Loads what is missing, and returns for each model the versions that are to serve from now on.

        Args:
          models: the models.
          found: the folders of each model's versions on disk.
          loaded: the versions of each model that serve now; none where it is absent.

        Returns:
          The versions of each model; empty if there is none to serve.
        """
        tables = {model.name: dict(loaded.get(model.name, {})) for model in models}
        candidates = {
            model.name: {
                version: path
                for version, path in found[model.name].items()
                if version in tables[model.name] or not self._is_refused(path)
            }
            for model in models
        }
        # A version that fails makes room for an older one, so what to load is worked out again. Each is tried once,
        # even if its files change meanwhile: a copy that grows is left alone until the next look.
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
                    tables[name][version] = self._loaded(name, version, servable)
        return {
            model.name: _kept(model, found[model.name], candidates[model.name], tables[model.name]) for model in models
        }

    def _loaded(self, name: str, version: int, servable: Servable) -> LoadedVersion:
        options = {"executor": self._run_executor, "batching": self._batching}
        if self._events is not None:
            options["on_batch"] = functools.partial(self._events.batch_ran, name)
        return LoadedVersion(name, version, servable, **options)

    def _is_refused(self, export_dir: Path) -> bool:
        return export_dir in self._refused and self._refused[export_dir] == _snapshot(export_dir)

    def _load_all(self, exports: Sequence[tuple[str, int, Path]]) -> list[Servable | None]:
        """Loads exports of models and versions; None, and remembered, for each that does not load."""
        for name, version, _ in exports:
            self._statuses.set(name, version, version_status.START)
        snapshots = [_snapshot(export_dir) for _, _, export_dir in exports]
        servables = list(self._load_executor.map(self._load, *zip(*exports, strict=True)))
        for (_, _, export_dir), snapshot, servable in zip(exports, snapshots, servables, strict=True):
            if servable is None:
                self._refused[export_dir] = snapshot
        return servables

    def _load(self, name: str, version: int, export_dir: Path) -> Servable | None:
        """Runs in a thread: returns None, and says why in the version's status, if the export does not load."""
        self._statuses.set(name, version, version_status.LOADING)
        start = time.monotonic()
        servable, reason = None, ""
        try:
            servable = self._load_export(export_dir)
        except ServingError as error:
            reason = str(error)
        # Files may vanish under the loader; whatever happens to one version, the others must go on.
        except Exception as error:
            _LOGGER.exception("Loading %s failed.", export_dir)
            reason = f"{export_dir} does not load: {error}"
        if servable is None:
            self._statuses.set(name, version, version_status.END, reason)
            _LOGGER.warning("Version %d of %s is refused: %s", version, name, reason)
        if self._events is not None:
            self._events.load_attempt(name, version, servable is not None, time.monotonic() - start)
        return servable


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


def _kept(model: ServedModel, found: Iterable[int], candidates: Iterable[int], versions: Versions) -> Versions:
    """Leaves out what the policy no longer asks for, as TensorFlow Serving's policy that preserves availability.

    A version whose folder is gone ends, be it the last one; but as long as the policy asks for versions of which none
    loads, the newest that is loaded goes on.
    """
    kept = {version: versions[version] for version in model.policy.choose(candidates)}
    if not kept and versions and model.policy.choose(found):
        newest = max(versions)
        return {newest: versions[newest]}
    return kept
