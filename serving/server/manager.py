"""Decides which version answers a request, and loads, watches and replaces versions while requests run.

The module also builds the messages about states and signatures of versions, for gRPC and for REST.
"""

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2

from serving.errors import RequestError, invalid_argument
from serving.saved_model import layout
from serving.saved_model.layout import ModelSpec
from serving.saved_model.servable import Servable, load_servable
from serving.server.loaded_version import LoadedVersion
from serving.server.metrics import Metrics
from serving.server.options import BatchingOptions
from serving.server.versions import AVAILABLE, UNLOADING, ModelTable, StatusBoard, VersionLoader
from serving.tf_serving import ServedModel, to_dict
from tff_pdp.errors import ServingError

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

_LOGGER = logging.getLogger(__name__)
# Number of versions that load at the same time.
_LOAD_THREADS = 2
# More than one, also on one core: a slow model must not hold up the others.
_RUN_THREADS = max(4, os.cpu_count() or 1)


class ModelManager:
    """The models that a server serves, and their loaded versions.

    Requests never wait for a change of the models: `acquire` and `statuses` lock a table only for a moment. `load`,
    `reload` and the watching thread make changes one after another, under a second lock. A change prepares a new table
    while the old one is in use. A version that the new table lacks is freed when the version's last request has ended.

    Attributes:
      statuses: the states of all versions ever seen.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        poll_seconds: float,
        metrics: Metrics,
        batching: BatchingOptions | None = None,
        load_export: Callable[[Path], Servable] = load_servable,
    ):
        """Stores the options; only `load`, `reload` and the watching thread read the disk.

        Args:
          models: models to serve, with different names.
          poll_seconds: seconds between two searches for changes on disk; 0 to search only in `load` and `reload`.
          metrics: counters of loads and batches.
          batching: options for merging requests; None to run each request on its own.
          load_export: function that checks, loads and warms up one export.
        """
        self._models = list(models)
        self._poll_seconds = poll_seconds
        # Folders that `reload` may read, with all folders below.
        self._allowed_roots = [model.base_path for model in models]
        self.statuses = StatusBoard()
        self._load_executor = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="load")
        self._run_executor = ThreadPoolExecutor(_RUN_THREADS, thread_name_prefix="run")
        self._loader = VersionLoader(
            load_export,
            load_executor=self._load_executor,
            run_executor=self._run_executor,
            batching=batching,
            statuses=self.statuses,
            metrics=metrics,
        )
        self._changing = threading.Lock()
        self._lock = threading.Lock()
        self._table = ModelTable([], {})
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="version-watcher", daemon=True)

    def load(self) -> None:
        """Loads the models for the first time.

        Raises:
          ServingError: a model has no version that loads, or a label names a version that is not served.
        """
        with self._changing:
            found = {model.name: layout.published_versions(model.base_path) for model in self._models}
            table = ModelTable(self._models, self._loader.bring_up(self._models, found, {}))
            try:
                self._check_first_load(table)
            except ServingError:
                self._discard(table)
                raise
            self._publish(table)

    def start_watching(self) -> None:
        """Starts the thread that searches for changes on disk, unless `poll_seconds` is 0."""
        if self._poll_seconds > 0:
            self._watcher.start()

    def stop(self) -> None:
        """Stops watching, frees every version, and ends all threads. Call this when all requests have ended."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        with self._changing:
            self._publish(ModelTable([], {}))
        self._load_executor.shutdown()
        self._run_executor.shutdown()

    @contextlib.contextmanager
    def acquire(self, spec: ModelSpec) -> Iterator[LoadedVersion]:
        """Yields the version that answers a request, and keeps it loaded until the block ends.

        Raises:
          RequestError: INVALID_ARGUMENT if `spec` has no name or an unknown label; NOT_FOUND if the version is not
            served.
        """
        with self._lock:
            version = self._table.find(spec)
            version.add_user()
        try:
            yield version
        finally:
            version.remove_user()

    async def reload(self, models: Sequence[ServedModel]) -> None:
        """Replaces the whole list of models, and returns when the new models are served. An error changes nothing.

        As in TensorFlow Serving, labels may name only versions that are served before the change. A list with a model
        that has no version to serve is refused; TensorFlow Serving would accept the list, or wait. The change is also
        made if the caller is cancelled.

        Raises:
          RequestError: PERMISSION_DENIED if a model's folder is outside the folders that the server was started with;
            INVALID_ARGUMENT if a model's folder is unreadable; FAILED_PRECONDITION if a label's version is not served;
            UNKNOWN if no version of a model loads.
        """
        self._check_folders(models)
        await asyncio.to_thread(self._reload, list(models))

    def _reload(self, models: list[ServedModel]) -> None:
        with self._changing:
            self._table.check_labels(models)
            try:
                found = {model.name: layout.published_versions(model.base_path) for model in models}
            except ServingError as error:
                raise invalid_argument(str(error)) from error
            loaded = {model.name: self._table.reusable_versions(model) for model in models}
            table = ModelTable(models, self._loader.bring_up(models, found, loaded))
            unavailable = [f"{{{name}{self._due_to(name)}}}" for name, found in table.versions.items() if not found]
            if unavailable:
                self._discard(table)
                message = f"{len(unavailable)} model(s) did not become available: {{{', '.join(unavailable)}}}"
                raise RequestError(grpc.StatusCode.UNKNOWN, message)
            self._publish(table)

    def _due_to(self, name: str) -> str:
        reasons = self.statuses.errors(name)
        return f" due to error: {' '.join(reasons)}" if reasons else ": no version found"

    def _check_folders(self, models: Iterable[ServedModel]) -> None:
        # Everyone who reaches the port may call: without this, every folder of this machine could be served.
        allowed = [root.resolve() for root in self._allowed_roots]
        for model in models:
            folder = model.base_path.resolve()
            if not any(folder.is_relative_to(root) for root in allowed):
                raise RequestError(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"Model {model.name} is at {model.base_path}, outside the folders this server was started with; "
                    "a request may only name folders below them.",
                )

    def _check_first_load(self, table: ModelTable) -> None:
        for model in table.models:
            if not table.versions[model.name]:
                raise ServingError(
                    f"No version of {model.name!r} under {model.base_path} can be served. "
                    + (
                        " ".join(self.statuses.errors(model.name))
                        or "Export a model there first, with `tff-pdp export`."
                    )
                )
        try:
            table.check_labels(table.models)
        except RequestError as error:
            raise ServingError(f"{error.message}. Point the label at a version that is served.") from error

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                with self._changing:
                    self._refresh()
            # The thread must outlive every failure of a look at the disk.
            except Exception:
                _LOGGER.exception("Looking for new versions failed; what is loaded goes on serving.")

    def _refresh(self) -> None:
        """Brings the models up to date with the disk."""
        found = {}
        for model in self._table.models:
            try:
                found[model.name] = layout.published_versions(model.base_path)
            except ServingError as error:
                # The folder may be gone for a moment, for instance while a volume is mounted again.
                _LOGGER.warning("%s Still serving what is loaded.", error)
        loaded = self._table.versions
        readable = [model for model in self._table.models if model.name in found]
        self._publish(ModelTable(self._table.models, {**loaded, **self._loader.bring_up(readable, found, loaded)}))

    def _publish(self, table: ModelTable) -> None:
        """Puts a new table in place, and retires the versions that it lacks."""
        with self._lock:
            before, self._table = self._table, table
        for version in table.lacking(before):
            self._retire(version)
        for version in before.lacking(table):
            _LOGGER.info("Serving version %d of %s.", version.version, version.name)
        self._report_available()

    def _discard(self, table: ModelTable) -> None:
        """Retires the versions that were loaded for a change that does not happen."""
        for version in self._table.lacking(table):
            self._retire(version)
        # If a model was to get another folder, versions of the same numbers were tried, and changed the states.
        self._report_available()

    def _report_available(self) -> None:
        for version in self._table.loaded():
            self.statuses.set(version.name, version.version, AVAILABLE)

    def _retire(self, version: LoadedVersion) -> None:
        self.statuses.set(version.name, version.version, UNLOADING)
        version.retire(lambda: self._unload(version))

    def _unload(self, version: LoadedVersion) -> None:
        # The last user may be on the event loop, which must not wait until a session has been freed.
        try:
            self._run_executor.submit(self._close, version)
        except RuntimeError:  # The executor is shut down.
            self._close(version)

    def _close(self, version: LoadedVersion) -> None:
        version.servable.close()
        self.statuses.end_unloading(version.name, version.version)


SIGNATURE_DEF = "signature_def"


def requested_spec(request: Any) -> ModelSpec:
    """Returns the model and version that a message asks for.

    Raises:
      RequestError: INVALID_ARGUMENT if the message has no ModelSpec.
    """
    if not request.HasField("model_spec"):
        raise invalid_argument("Missing ModelSpec")
    message: model_pb2.ModelSpec = request.model_spec
    choice = message.WhichOneof("version_choice")
    return ModelSpec(
        message.name,
        message.version.value if choice == "version" else None,
        message.version_label if choice == "version_label" else None,
    )


def metadata_response(loaded: LoadedVersion) -> get_model_metadata_pb2.GetModelMetadataResponse:
    """Builds the metadata message of a loaded version, which describes the version's signatures."""
    response = get_model_metadata_pb2.GetModelMetadataResponse()
    response.model_spec.name = loaded.name
    response.model_spec.version.value = loaded.version
    signatures = get_model_metadata_pb2.SignatureDefMap()
    for name, signature in loaded.servable.signatures.items():
        signatures.signature_def[name].CopyFrom(signature)
    response.metadata[SIGNATURE_DEF].Pack(signatures)
    return response


def status_response(manager: ModelManager, spec: ModelSpec) -> get_model_status_pb2.GetModelStatusResponse:
    """Builds the status message of version `spec.version`; if `spec.version` is None, of all versions, newest first.

    Raises:
      RequestError: NOT_FOUND if the model or the version is unknown.
    """
    response = get_model_status_pb2.GetModelStatusResponse()
    for status in manager.statuses.get(spec.name, spec.version):
        entry = response.model_version_status.add()
        entry.version = status.version
        entry.state = get_model_status_pb2.ModelVersionStatus.State.Value(status.state)
        if status.error:
            entry.status.error_code = grpc.StatusCode.UNKNOWN.value[0]
            entry.status.error_message = status.error
    return response


def metadata_json(loaded: LoadedVersion) -> bytes:
    """Returns the message of `metadata_response` as JSON."""
    message = to_dict(metadata_response(loaded))
    # The wrapper `Any` names its type, which TensorFlow Serving leaves out.
    for field in message["metadata"].values():
        field.pop("@type", None)
    return json.dumps(message).encode()


def status_json(manager: ModelManager, spec: ModelSpec) -> bytes:
    """Returns the message of `status_response` as JSON."""
    message = to_dict(status_response(manager, spec))
    for entry in message["model_version_status"]:
        entry.setdefault("status", {"error_code": "OK", "error_message": ""})
    return json.dumps(message).encode()
