import shlex
import subprocess
import sys

import pytest
from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2

from serving.production.exports import docker_command, write_models_config
from tests.serving.production.fake_exports import write_export
from tff_pdp.errors import ServingError


def test_models_config_parses_and_agrees_with_the_command(tmp_path):
    write_export(tmp_path, 1)
    path = write_models_config(tmp_path, "toy")
    config = text_format.Parse(path.read_text(), model_server_config_pb2.ModelServerConfig())
    (entry,) = config.model_config_list.config
    assert (entry.name, entry.base_path, entry.model_platform) == ("toy", "/models/toy", "tensorflow")
    assert entry.model_version_policy.latest.num_versions == 1
    words = shlex.split(docker_command(tmp_path, "toy"))
    assert words[:3] == ["docker", "run", "--rm"]
    assert f"type=bind,source={tmp_path},target=/models/toy,readonly" in words
    assert "127.0.0.1:8501:8501" in words
    assert words[-1] == f"--model_config_file=/models/toy/{path.name}"


def test_the_server_runs_as_whom_the_exports_belong_to(tmp_path, monkeypatch):
    # Without capabilities, root may read no more than anybody else.
    stat = type("Stat", (), {"st_uid": 1000, "st_gid": 100})
    monkeypatch.setattr(type(tmp_path), "stat", lambda _: stat)
    words = shlex.split(docker_command(tmp_path, "toy"))
    assert {"--user=1000:100", "--cap-drop=ALL"} <= set(words)
    stat.st_uid = stat.st_gid = 0
    assert "--user=65534:65534" in shlex.split(docker_command(tmp_path, "toy"))


def test_a_config_with_the_model_in_it_stays(tmp_path):
    write_export(tmp_path, 1)
    path = write_models_config(tmp_path, "toy")
    changed = path.read_text() + "# changed by hand\n"
    path.write_text(changed)
    write_models_config(tmp_path, "toy")
    assert path.read_text() == changed
    write_models_config(tmp_path, "renamed")
    assert '"renamed"' in path.read_text()


def test_nothing_to_serve_is_refused(tmp_path):
    with pytest.raises(ServingError, match="holds no version"):
        write_models_config(tmp_path, "toy")
    (tmp_path / "1").mkdir()
    with pytest.raises(ServingError, match="holds no version"):
        write_models_config(tmp_path, "toy")
    with pytest.raises(ServingError, match="cannot be served"):
        write_models_config(tmp_path, 'a"b')


@pytest.mark.parametrize(
    ("module", "absent"), [("serving.production.kit", ["tensorflow"]), ("serving.commands", ["tensorflow", "grpc"])]
)
def test_what_starts_fast_imports_little(module, absent):
    program = f"import sys, {module}; sys.exit(bool(set(sys.modules) & set({absent})))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
