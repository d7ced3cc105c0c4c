"""The manifests for Kubernetes agree with each other and with the packages here; their check sees each kind of mistake.

`make kuberay` compares the manifests with KubeRay's own schema, which takes a download.
"""

import importlib.metadata
import io
import re
import zipfile

import pytest
import yaml

from tests.places import ROOT
from tff_pdp import __version__
from tools.kuberay.check import FOLDER, VERSION, CheckError, closed, mistakes, read_schemas

CLUSTER, JOB, CLAIM = (
    yaml.safe_load((FOLDER / name).read_text()) for name in ("raycluster.yaml", "rayjob.yaml", "volume.yaml")
)
HEAD, WORKERS = CLUSTER["spec"]["headGroupSpec"], CLUSTER["spec"]["workerGroupSpecs"]
# A schema as Kubernetes writes it, with each form that the check converts.
SCHEMA = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "properties": {
                "properties": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "cpu": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
                "since": {"type": "string", "nullable": True},
                "rest": {
                    "type": "object",
                    "properties": {"a": {"type": "string"}},
                    "x-kubernetes-preserve-unknown-fields": True,
                },
                "items": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
            },
        },
    },
}


def found_in(spec: dict) -> list[str]:
    document = yaml.safe_dump({"kind": "Thing", "metadata": {"name": "t"}, "spec": spec})
    return list(mistakes(document, {"Thing": closed(SCHEMA)}))


@pytest.mark.parametrize(
    "spec",
    [
        {"properties": 1, "labels": {"any": "label"}, "cpu": "500m", "since": None},
        {"cpu": 2, "rest": {"a": "b", "any": 1}, "items": [{"name": "x"}]},
    ],
)
def test_a_manifest_that_fits_has_no_mistake(spec):
    assert found_in(spec) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"lables": {}}, r"^spec: .*'lables' was unexpected"),
        ({"items": [{"name": "x"}, {"nmae": "y"}]}, r"^spec\.items\.1: .*'nmae' was unexpected"),
        ({"properties": 0}, r"^spec\.properties: 0 is less than or equal to the minimum of 0"),
        ({"labels": {"any": 1}}, r"^spec\.labels\.any: 1 is not of type 'string'"),
        ({"cpu": [1]}, r"^spec\.cpu: \[1\] is not valid"),
        ({"rest": {"a": 1}}, r"^spec\.rest\.a: 1 is not of type 'string'"),
        (3, r"^spec: 3 is not of type 'object'"),
    ],
)
def test_a_mistake_is_named_with_its_place(spec, message):
    (found,) = found_in(spec)
    assert re.search(message, found)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("kind: Thing", "'spec' is a required property"),
        ("kind: Other", "the kind 'Other' is not known"),
        ("- 1", "the kind None"),
        ("a: [", "no YAML"),
    ],
)
def test_a_manifest_without_a_known_kind_is_a_mistake(manifest, message):
    (found,) = mistakes(manifest, {"Thing": closed(SCHEMA)})
    assert message in found


def test_an_archive_without_definitions_is_refused():
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("README.md", "-")
    with pytest.raises(CheckError, match=f"KubeRay {VERSION} has no definition of RayCluster"):
        read_schemas(archive.getvalue())


def test_manifests_name_the_versions_here():
    assert CLUSTER["spec"]["rayVersion"] == importlib.metadata.version("ray")
    for group in (HEAD, *WORKERS):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(f"/tff-pdp:{__version__}")


def test_the_job_asks_for_the_workers_of_the_cluster():
    (workers,) = WORKERS
    cores = workers["replicas"] * int(workers["rayStartParams"]["num-cpus"])
    assert f"--workers ray:{cores}" in JOB["spec"]["entrypoint"]
    assert HEAD["rayStartParams"]["num-cpus"] == "0"
    assert JOB["spec"]["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}


@pytest.mark.parametrize("group", [HEAD, *WORKERS], ids=["head", "workers"])
def test_pods_share_the_volume_and_have_few_rights(group):
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/shared"}]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert "env" not in container
    assert "envFrom" not in container


def test_the_image_installs_pinned_packages_and_no_data():
    image = (FOLDER / "Containerfile").read_text()
    copied = re.findall(r"^COPY (\S+)", image, re.MULTILINE)
    assert copied == ["tff_pdp/requirements.txt", "tools/kuberay/requirements.txt", "dist/tff_pdp-*.whl"]
    assert image.count("--no-deps") == image.count("pip install") == 2
    pins = [set(re.findall(r"^(\S+)==", (ROOT / file).read_text(), re.MULTILINE)) for file in copied[:2]]
    assert not pins[0] & pins[1]
