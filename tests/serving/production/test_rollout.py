"""Rollouts on a server with TensorFlow Serving's rule: a label may only be given to a version that is available."""

import argparse
import contextlib
import threading
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from tensorflow_serving.apis import get_model_status_pb2, model_management_pb2, model_service_pb2_grpc

from serving.production import command, rollout
from serving.production.kit import write_production_kit
from serving.production.rollout import plan_promotion, plan_rollout, roll_out
from serving.server.model_config import Latest, ServedModel, Specific, read_model_config_file
from tests.serving.production.fake_exports import write_export
from tff_pdp.errors import ServingError

LOADING, AVAILABLE, END = 20, 30, 50


class LabelServer(model_service_pb2_grpc.ModelServiceServicer):
    """Loads versions some time after they are asked for; `broken` ones fail."""

    def __init__(self, broken=(), load_seconds=0.2):
        self.load_seconds = load_seconds
        self.broken = set(broken)
        self.states = {"toy": {1: AVAILABLE}, "other": {1: AVAILABLE}}
        self.labels = {}
        self.lists = []

    def HandleReloadConfigRequest(self, request, context):
        response = model_management_pb2.ReloadConfigResponse()
        entries = request.config.model_config_list.config
        self.lists.append([entry.name for entry in entries])
        for entry in entries:
            for version in entry.version_labels.values():
                if self.states[entry.name].get(version) != AVAILABLE:
                    response.status.error_code = 9
                    response.status.error_message = f"version {version} is not currently available"
                    return response
        self.labels = {entry.name: dict(entry.version_labels) for entry in entries}
        for entry in entries:
            wanted = set(entry.model_version_policy.specific.versions)
            states = self.states[entry.name]
            for version in set(states) - wanted if wanted else ():
                states[version] = END
            for version in wanted - {one for one, state in states.items() if state == AVAILABLE}:
                states[version] = LOADING
                timer = threading.Timer(self.load_seconds, self._loaded, (states, version))
                timer.daemon = True
                timer.start()
        return response

    def _loaded(self, states, version):
        states[version] = END if version in self.broken else AVAILABLE

    def GetModelStatus(self, request, context):
        response = get_model_status_pb2.GetModelStatusResponse()
        for version, state in self.states[request.model_spec.name].items():
            entry = response.model_version_status.add(version=version, state=state)
            if state == END and version in self.broken:
                entry.status.error_code = 13
                entry.status.error_message = "no such file"
        return response


@contextlib.contextmanager
def _running(service: LabelServer):
    with futures.ThreadPoolExecutor(2) as executor:
        server = grpc.server(executor)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0.1).wait()


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(rollout, "_POLL_SECONDS", 0.02)
    for version in (1, 2, 3):
        write_export(tmp_path / "models" / "toy", version)
    write_export(tmp_path / "models" / "other", 1)
    write_production_kit([tmp_path / "models"], tmp_path / "kit")
    return tmp_path


def test_the_plan_loads_before_it_labels():
    other = ServedModel("other", Path("/models/other"))
    toy = ServedModel("toy", Path("/models/toy"), Specific((1, 2)), {"stable": 1, "canary": 2})
    plan = plan_rollout([other, toy], "toy", 2, 3)
    assert list(plan.loading) == [
        other,
        ServedModel("toy", Path("/models/toy"), Specific((1, 2, 3)), {"stable": 1, "canary": 2}),
    ]
    assert list(plan.final) == [
        other,
        ServedModel("toy", Path("/models/toy"), Specific((2, 3)), {"stable": 2, "canary": 3}),
    ]
    promotion = plan_promotion([other, toy], "toy")
    assert promotion.final[1] == ServedModel("toy", Path("/models/toy"), Specific((2,)), {"stable": 2})
    with pytest.raises(ServingError, match="has no canary"):
        plan_promotion([other, toy], "other")
    with pytest.raises(ServingError, match="'digits' is not in the list; it has other, toy"):
        plan_rollout([other, toy], "digits", 1)


def test_a_canary_and_its_promotion_on_a_running_server(models):
    config_file, base_path = models / "kit" / "models.config", models / "models" / "toy"
    service = LabelServer()
    with _running(service) as address:
        roll_out(config_file, base_path, "toy", stable=1, canary=2, address=address, timeout_seconds=10)
        assert service.labels["toy"] == {"stable": 1, "canary": 2}
        roll_out(config_file, base_path, "toy", address=address, timeout_seconds=10)
        assert service.labels["toy"] == {"stable": 2}
        roll_out(config_file, base_path, "toy", stable=3, address=address, timeout_seconds=10)
    assert service.labels["toy"] == {"stable": 3}
    assert service.states["toy"] == {1: END, 2: END, 3: AVAILABLE}
    assert service.states["other"] == {1: AVAILABLE}
    assert all(names == ["other", "toy"] for names in service.lists)
    other, toy = read_model_config_file(config_file)
    assert (other.policy, toy.policy, toy.labels) == (Latest(1), Specific((3,)), {"stable": 3})


def test_a_version_that_does_not_load_changes_no_label_and_no_file(models):
    config_file, base_path = models / "kit" / "models.config", models / "models" / "toy"
    service = LabelServer(broken=[2])
    with _running(service) as address:
        roll_out(config_file, base_path, "toy", stable=1, address=address, timeout_seconds=10)
        before = config_file.read_text()
        with pytest.raises(ServingError, match=r"cannot load version 2 of 'toy': no such file\. Labels"):
            roll_out(config_file, base_path, "toy", stable=1, canary=2, address=address, timeout_seconds=10)
    assert service.labels["toy"] == {"stable": 1}
    assert service.states["toy"][1] == AVAILABLE
    assert config_file.read_text() == before


def test_a_server_that_is_too_slow_or_refuses(models):
    config_file, base_path = models / "kit" / "models.config", models / "models" / "toy"
    service = LabelServer(load_seconds=60)
    with _running(service) as address:
        with pytest.raises(ServingError, match=r"did not load version 2 of 'toy' in time"):
            roll_out(config_file, base_path, "toy", stable=1, canary=2, address=address, timeout_seconds=1)
        service.states["toy"] = {}
        roll_out(config_file, base_path, "toy", stable=1)
        with pytest.raises(ServingError, match="answered FAILED_PRECONDITION: version 1 is not currently available"):
            roll_out(config_file, base_path, "toy", stable=2, address=address, timeout_seconds=10)


def test_versions_must_be_on_disk(models):
    with pytest.raises(ServingError, match="holds no complete version 9; it has 1, 2, 3"):
        roll_out(models / "kit" / "models.config", models / "models" / "toy", "toy", stable=9)
    with pytest.raises(ServingError, match="not a readable model config"):
        roll_out(models / "absent", models / "models" / "toy", "toy", stable=1)


def test_the_command_without_a_server_writes_the_file(models, capsys):
    parser = argparse.ArgumentParser()
    command.add_commands(parser.add_subparsers())
    config_file = models / "kit" / "models.config"
    common = ["rollout", str(models / "models" / "toy"), "--model-name", "toy", "--config", str(config_file)]
    options = parser.parse_args([*common, "--stable", "1", "--canary", "2"])
    assert options.run(options) == 0
    assert "toy: stable 1, canary 2 (the file only" in capsys.readouterr().out
    options = parser.parse_args([*common, "--promote"])
    assert options.run(options) == 0
    assert read_model_config_file(config_file)[1].labels == {"stable": 2}
    options = parser.parse_args([*common, "--promote", "--canary", "3"])
    with pytest.raises(ServingError, match="--promote makes the canary stable"):
        options.run(options)
