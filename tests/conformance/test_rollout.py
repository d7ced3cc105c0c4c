"""A production kit, and a rollout by labels, on the embedded server: a server that others use is not reconfigured."""

import numpy as np
import pytest

from serving.client.calls import ServerError
from serving.client.grpc_client import GrpcClient
from serving.production.containers import BATCHING_FILE
from serving.production.kit import write_production_kit
from serving.production.rollout import roll_out
from serving.server.embedded import EmbeddedServer
from serving.server.options import read_batching_file
from serving.tf_serving import CONFIG_FILE, MODELS_DIRECTORY, read_model_config_file
from tests.conformance.models import CANARY, CLASSIFIER, REGRESSION, STABLE, TOLERANCE, classifier

X = np.array([[[[0.0], [0.5]], [[1.0], [0.25]]]], np.float32)


def test_a_kit_is_served_and_labels_move(models_folder, tmp_path):
    write_production_kit([models_folder], tmp_path)
    config_file = tmp_path / CONFIG_FILE
    config_file.write_text(config_file.read_text().replace(MODELS_DIRECTORY, str(models_folder)))
    base_path = models_folder / CLASSIFIER
    batching = read_batching_file(tmp_path / BATCHING_FILE)

    def answers_of(version):
        return pytest.approx(classifier(version).expected(["bob"], X), abs=TOLERANCE)

    with EmbeddedServer(read_model_config_file(config_file), batching=batching) as server:
        address = f"127.0.0.1:{server.grpc_port}"
        with GrpcClient(address) as client:
            assert client.predict(CLASSIFIER, ["bob"], X).answers == answers_of(CANARY)
            roll_out(config_file, base_path, CLASSIFIER, stable=STABLE, canary=CANARY, address=address)
            assert client.predict(CLASSIFIER, ["bob"], X, label="stable").answers == answers_of(STABLE)
            assert client.predict(CLASSIFIER, ["bob"], X, label="canary").answers == answers_of(CANARY)
            roll_out(config_file, base_path, CLASSIFIER, address=address)
            assert client.predict(CLASSIFIER, ["bob"], X, label="stable").answers == answers_of(CANARY)
            with pytest.raises(ServerError, match="Unrecognized servable version label: canary"):
                client.predict(CLASSIFIER, ["bob"], X, label="canary")
            roll_out(config_file, base_path, CLASSIFIER, stable=STABLE, address=address)
            assert client.predict(CLASSIFIER, ["bob"], X).answers == answers_of(STABLE)
            assert [state.state for state in client.status(REGRESSION)] == ["AVAILABLE"]
    # A server that starts anew finds the labels in the file.
    with (
        EmbeddedServer(read_model_config_file(config_file), batching=batching) as server,
        GrpcClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        assert client.predict(CLASSIFIER, ["bob"], X, label="stable").answers == answers_of(STABLE)
