import http.server
import subprocess
import threading
from pathlib import Path

import pytest
import yaml
from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2

from serving.__main__ import COMMANDS, main
from serving.client.model_client import DEFAULT_MAX_BATCH_SIZE
from serving.production.containers import batching_parameters, health_script
from serving.production.kit import write_production_kit
from serving.production.options import KitOptions
from serving.server.options import read_batching_file
from serving.tf_serving import read_model_config_file
from tests.serving.production.fake_exports import write_export
from tests.unrun import parse
from tff_pdp.errors import ServingError

MIB = 2**20


@pytest.fixture
def models(tmp_path) -> Path:
    """Two models, of which one has two versions, and two folders that are not complete."""
    folder = tmp_path / "models"
    write_export(folder / "digits", 1, 3 * MIB)
    write_export(folder / "digits", 2, 5 * MIB)
    write_export(folder / "letters", 7, 2 * MIB)
    (write_export(folder / "damaged", 1) / "saved_model.pb").unlink()
    (folder / "empty").mkdir()
    return folder


def _config(folder: Path):
    return text_format.Parse((folder / "models.config").read_text(), model_server_config_pb2.ModelServerConfig())


def _yaml(path: Path):
    return list(yaml.safe_load_all(path.read_text()))


def test_models_config_lists_every_base_path_with_a_complete_version(models, tmp_path):
    write_production_kit([models], tmp_path / "kit")
    entries = _config(tmp_path / "kit").model_config_list.config
    assert [(entry.name, entry.base_path, entry.model_platform) for entry in entries] == [
        ("digits", "/models/digits", "tensorflow"),
        ("letters", "/models/letters", "tensorflow"),
    ]
    assert all(entry.model_version_policy.latest.num_versions == 1 for entry in entries)
    assert [model.name for model in read_model_config_file(tmp_path / "kit" / "models.config")] == ["digits", "letters"]


def test_versions_and_labels_of_one_model(models, tmp_path):
    write_production_kit(
        [models / "digits"], tmp_path / "kit", model_name="mnist", labels={"stable": 1, "canary": 2}, versions=[2]
    )
    (entry,) = _config(tmp_path / "kit").model_config_list.config
    assert (entry.name, entry.base_path) == ("mnist", "/models/mnist")
    assert list(entry.model_version_policy.specific.versions) == [1, 2]
    assert dict(entry.version_labels) == {"stable": 1, "canary": 2}


def test_server_options_fit_the_clients(models, tmp_path):
    write_production_kit([models], tmp_path / "kit")
    read = read_batching_file(tmp_path / "kit" / "batching_parameters.txt")
    assert read.max_batch_size == DEFAULT_MAX_BATCH_SIZE == 64
    assert read.allowed_batch_sizes == (1, 2, 4, 8, 16, 32, 64)
    assert (read.max_enqueued_batches, read.num_batch_threads) == (100, 2)
    lines = batching_parameters(KitOptions(max_batch_size=48)).splitlines()
    assert lines[0] == "max_batch_size { value: 48 }"
    assert lines[4] == "enable_large_batch_splitting { value: true }"
    assert [line for line in lines if line.startswith("allowed")] == [
        f"allowed_batch_sizes: {size}" for size in (1, 2, 4, 8, 16, 32, 48)
    ]
    assert batching_parameters(KitOptions(max_batch_size=1)).count("allowed_batch_sizes") == 1
    assert (tmp_path / "kit" / "monitoring.config").read_text().split() == (
        ["prometheus_config", "{", "enable:", "true", "path:", '"/monitoring/prometheus/metrics"', "}"]
    )


def test_compose_file_mounts_what_it_names_and_nothing_writable(models, tmp_path):
    write_production_kit([models], tmp_path / "kit")
    (document,) = _yaml(tmp_path / "kit" / "docker-compose.yaml")
    (service,) = document["services"].values()
    assert service["image"] == "tensorflow/serving:2.14.1"
    assert service["ports"] == ["127.0.0.1:8500:8500", "127.0.0.1:8501:8501"]
    mounts = {mount["target"]: mount for mount in service["volumes"]}
    assert all(mount["read_only"] for mount in mounts.values())
    assert mounts["/models/digits"]["source"] == str(models / "digits")
    assert mounts["/models/letters"]["source"] == str(models / "letters")
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["user"] not in ("0:0", "")
    assert service["healthcheck"]["test"] == ["CMD", "bash", "-c", health_script("digits")]
    assert not {"privileged", "network_mode", "cap_add", "devices", "pid"} & set(service)
    for argument in service["command"]:
        name, _, value = argument.partition("=")
        if name.endswith("_file"):
            inside = Path(value)
            assert (Path(mounts[str(inside.parent)]["source"]) / inside.name).is_file()


def test_kubernetes_manifests_agree_with_each_other(models, tmp_path):
    write_production_kit([models], tmp_path / "kit", options=KitOptions(replicas=3, cpus=4, volume_claim="claim"))
    deployment, service, budget = _yaml(tmp_path / "kit" / "kubernetes.yaml")
    assert [one["kind"] for one in (deployment, service, budget)] == ["Deployment", "Service", "PodDisruptionBudget"]
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    (container,) = template["spec"]["containers"]
    named_ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named_ports == {"grpc": 8500, "rest": 8501}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(named_ports)
    paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
    assert paths == ["/v1/models/digits", "/v1/models/digits/metadata", "/v1/models/digits"]
    # Models of 5 and 2 MiB: twice, and a fifth more, is 16.8 MiB.
    assert container["resources"] == {"requests": {"cpu": "4", "memory": "529Mi"}, "limits": {"memory": "1058Mi"}}
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "claim", "readOnly": True}
    # Several servers share it.
    assert "must be ReadOnlyMany or ReadWriteMany" in (tmp_path / "kit" / "README.md").read_text()
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    (compose,) = _yaml(tmp_path / "kit" / "docker-compose.yaml")
    assert container["args"] == compose["services"]["tensorflow-serving"]["command"]
    (kustomization,) = _yaml(tmp_path / "kit" / "kustomization.yaml")
    (generator,) = kustomization["configMapGenerator"]
    assert generator["name"] == volumes["config"]["configMap"]["name"]
    for name in (*generator["files"], *kustomization["resources"]):
        assert (tmp_path / "kit" / name).is_file()
    in_config_map = {f"/config/{name}" for name in generator["files"]}
    assert {argument.partition("=")[2] for argument in container["args"] if "_file=" in argument} == in_config_map


def test_the_health_check_runs_in_bash():
    state = {"value": "AVAILABLE"}
    paths = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"model_version_status": [{"state": "%s"}]}' % state["value"].encode())

        def log_message(self, *_):
            pass

    def healthy(port: int) -> bool:
        return subprocess.run(["bash", "-c", health_script("toy", port)], check=False, timeout=10).returncode == 0

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        assert healthy(port)
        for other in ("LOADING", "UNAVAILABLE"):
            state["value"] = other
            assert not healthy(port)
        server.shutdown()
        thread.join()
    assert not healthy(port)
    assert paths == ["/v1/models/toy"] * 3


def test_what_cannot_be_deployed_is_refused(models, tmp_path):
    kit = tmp_path / "kit"
    with pytest.raises(ServingError, match="empty holds no complete version"):
        write_production_kit([models / "empty"], kit)
    with pytest.raises(ServingError, match="holds no complete version 9; it has 1, 2"):
        write_production_kit([models / "digits"], kit, versions=[1, 9])
    with pytest.raises(ServingError, match="for a single model, but 2 models were found"):
        write_production_kit([models], kit, model_name="digits")
    write_export(tmp_path / "other" / "digits", 1)
    with pytest.raises(ServingError, match="would both be served as 'digits'"):
        write_production_kit([models, tmp_path / "other"], kit)
    assert not kit.exists()


def test_a_kit_is_replaced_only_on_demand(models, tmp_path):
    write_production_kit([models], tmp_path / "kit")
    with pytest.raises(ServingError, match="serving rollout"):
        write_production_kit([models / "digits"], tmp_path / "kit")
    write_production_kit([models / "digits"], tmp_path / "kit", replace=True)
    assert len(_config(tmp_path / "kit").model_config_list.config) == 1


def test_the_command_writes_a_kit(models, tmp_path, capsys):
    words = ["deploy", str(models / "digits"), "--output", str(tmp_path / "kit"), "--label", "stable=1", "--cpus", "3"]
    assert main(words) == 0
    assert {Path(line).name for line in capsys.readouterr().out.split()} == {
        *("models.config", "batching_parameters.txt", "monitoring.config"),
        *("docker-compose.yaml", "kustomization.yaml", "kubernetes.yaml", "README.md"),
    }
    (entry,) = _config(tmp_path / "kit").model_config_list.config
    assert dict(entry.version_labels) == {"stable": 1}
    assert "num_batch_threads { value: 3 }" in (tmp_path / "kit" / "batching_parameters.txt").read_text()
    with pytest.raises(ServingError, match="LABEL=VERSION"):
        parse(COMMANDS, [*words[:4], "--label", "stable"]).run()
