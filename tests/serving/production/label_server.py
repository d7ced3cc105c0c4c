"""A server of models without models: it says of versions and labels what TensorFlow Serving would."""

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent import futures

import grpc
from tensorflow_serving.apis import get_model_status_pb2, model_management_pb2, model_service_pb2_grpc

LOADING, AVAILABLE, END = 20, 30, 50


class LabelServer(model_service_pb2_grpc.ModelServiceServicer):
    """Loads versions some time after they are asked for; `broken` ones fail, and say so until they load.

    A list is taken at once, and its labels count at once: one may only be given to a version that is available. The
    versions change when the server next looks, after `poll_seconds`, at the newest list alone. A version that failed is
    tried again only after a list without it.
    """

    def __init__(
        self,
        stored: Mapping[str, Collection[int]],
        broken: Collection[int] = (),
        load_seconds: float = 0.1,
        poll_seconds: float = 0.0,
    ):
        self.stored = stored
        self.broken = set(broken)
        self.load_seconds = load_seconds
        self.poll_seconds = poll_seconds
        self.wanted = {name: {max(versions)} for name, versions in stored.items()}
        self.states = {name: {max(versions): AVAILABLE} for name, versions in stored.items()}
        self.failed = set()
        self.labels = {}
        self.lists = []
        self._newest = None
        self._lock = threading.RLock()

    def HandleReloadConfigRequest(self, request, context):
        entries = request.config.model_config_list.config
        with self._lock:
            self.lists.append({entry.name: sorted(entry.model_version_policy.specific.versions) for entry in entries})
            for entry in entries:
                for version in entry.version_labels.values():
                    if self.states[entry.name].get(version) != AVAILABLE:
                        context.abort(
                            grpc.StatusCode.FAILED_PRECONDITION, f"version {version} is not currently available"
                        )
            self.labels = {entry.name: dict(entry.version_labels) for entry in entries}
            self._newest = entries
            self._later(self.poll_seconds, self._look)
        return model_management_pb2.ReloadConfigResponse()

    def GetModelStatus(self, request, context):
        response = get_model_status_pb2.GetModelStatusResponse()
        name = request.model_spec.name
        with self._lock:
            for version, state in self.states[name].items():
                entry = response.model_version_status.add(version=version, state=state)
                if state == END and (name, version) in self.failed:
                    entry.status.error_code = 13
                    entry.status.error_message = "no such file"
        return response

    def _look(self):
        for entry in self._newest:
            states, before = self.states[entry.name], self.wanted[entry.name]
            wanted = {*entry.model_version_policy.specific.versions} or {max(self.stored[entry.name])}
            self.wanted[entry.name] = wanted
            for version in before - wanted:
                states[version] = END
            for version in (wanted - before) & set(self.stored[entry.name]):
                states[version] = LOADING
                self.failed.discard((entry.name, version))
                self._later(self.load_seconds, self._load, entry.name, version)

    def _load(self, name, version):
        if version in self.broken:
            self.failed.add((name, version))
        served = version in self.wanted[name] and version not in self.broken
        self.states[name][version] = AVAILABLE if served else END

    def _later(self, seconds, call, *arguments):
        if not seconds:
            call(*arguments)
            return
        timer = threading.Timer(seconds, self._locked, (call, *arguments))
        timer.daemon = True
        timer.start()

    def _locked(self, call, *arguments):
        with self._lock:
            call(*arguments)


@contextlib.contextmanager
def running(service: LabelServer) -> Iterator[str]:
    """The address of its gRPC API."""
    with futures.ThreadPoolExecutor(2) as executor:
        server = grpc.server(executor)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0.1).wait()
