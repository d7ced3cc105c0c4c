"""The server that is asked: the one that TFF_PDP_SERVING names, or else the embedded one."""

import dataclasses
import os

import pytest
import urllib3

from serving.client.grpc_client import GrpcClient
from serving.client.rest_client import RestClient
from tests.conformance.models import CLASSIFIER, write_models

ADDRESSES = "TFF_PDP_SERVING"


@dataclasses.dataclass(frozen=True)
class Addresses:
    """`host:port` of both APIs."""

    grpc: str
    rest: str


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory):
    """The conformance models, in files that name this folder."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, models_directory=folder)
    return folder


@pytest.fixture(scope="session")
def addresses(request):
    """Where the conformance models are served."""
    if text := os.environ.get(ADDRESSES):
        grpc, _, rest = text.partition(",")
        if not rest:
            pytest.exit(f"{ADDRESSES} must be 'host:grpc_port,host:rest_port', not {text!r}", returncode=2)
        # Here and once, not in every test.
        with RestClient(rest) as client:
            client.status(CLASSIFIER)
        yield Addresses(grpc, rest)
        return
    from serving.production.containers import BATCHING_FILE
    from serving.server.embedded import EmbeddedServer
    from serving.server.options import read_batching_file
    from serving.tf_serving import CONFIG_FILE, read_model_config_file

    folder = request.getfixturevalue("models_folder")
    models = read_model_config_file(folder / CONFIG_FILE)
    with EmbeddedServer(models, batching=read_batching_file(folder / BATCHING_FILE)) as server:
        yield Addresses(f"127.0.0.1:{server.grpc_port}", f"127.0.0.1:{server.rest_port}")


@pytest.fixture(scope="session", params=["gRPC", "REST"])
def client(request, addresses):
    """Each client in turn."""
    build, address = (GrpcClient, addresses.grpc) if request.param == "gRPC" else (RestClient, addresses.rest)
    with build(address) as opened:
        yield opened


@pytest.fixture(scope="session")
def send(addresses):
    """Sends one REST request as it is: `(method, path, body or None) -> (HTTP status, body)`."""
    with urllib3.PoolManager(retries=False) as pool:

        def request(method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
            response = pool.request(method, f"http://{addresses.rest}{path}", body=body, timeout=30)
            return response.status, response.data

        yield request
