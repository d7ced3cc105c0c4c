"""Writes the files of servers in containers: arguments and option files, a Compose file, and Kubernetes manifests."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.client.model_client import DEFAULT_MAX_BATCH_SIZE
from serving.production.exports import ExportedModel
from serving.tf_serving import CONFIG_FILE, DOCKER_IMAGE, LABELS_ARGUMENT, METRICS_PATH, MODELS_DIRECTORY, NOBODY, owner
from tff_pdp.errors import ServingError

BATCHING_FILE = "batching_parameters.txt"
MONITORING_FILE = "monitoring.config"
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class KitOptions:
    """Options of a deployment.

    Attributes:
      image: the container image of TensorFlow Serving.
      max_batch_size: most examples in a request and in a merged batch, by default as many as our clients send.
      batch_timeout_micros: how long a request may wait for others to be merged with.
      max_enqueued_batches: batches that wait; requests beyond them are UNAVAILABLE, which our clients try again.
      num_batch_threads: batches that run at the same time.
      cpus: CPU cores of one server.
      replicas: servers in Kubernetes.
      grpc_port: port of the gRPC API on a machine that runs docker.
      rest_port: port of the REST API on a machine that runs docker.
      models_directory: where a server sees the models, as `<models_directory>/<model name>/<version>`.
      volume_claim: name of the PersistentVolumeClaim that holds the models in Kubernetes.

    Raises:
      ServingError: naming the first value that is out of range.
    """

    image: str = DOCKER_IMAGE
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    batch_timeout_micros: int = 1000
    max_enqueued_batches: int = 100
    num_batch_threads: int = 2
    cpus: int = 2
    replicas: int = 2
    grpc_port: int = 8500
    rest_port: int = 8501
    models_directory: str = MODELS_DIRECTORY
    volume_claim: str = "personal-models"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < (0 if field.name == "batch_timeout_micros" else 1):
                raise ServingError(f"{field.name} must be positive; was {value}.")


def batching_parameters(options: KitOptions) -> str:
    """Returns the text of a `--batching_parameters_file`.

    Batches are padded to one of few sizes, so that the server meets no size that the warm-up did not come near.
    """
    sizes = [1]
    while sizes[-1] * 2 < options.max_batch_size:
        sizes.append(sizes[-1] * 2)
    sizes = sorted({*sizes, options.max_batch_size})
    lines = [
        f"max_batch_size {{ value: {options.max_batch_size} }}",
        f"batch_timeout_micros {{ value: {options.batch_timeout_micros} }}",
        f"max_enqueued_batches {{ value: {options.max_enqueued_batches} }}",
        f"num_batch_threads {{ value: {options.num_batch_threads} }}",
        # Fills batches up with parts of requests; a request above max_batch_size is refused all the same.
        "enable_large_batch_splitting { value: true }",
        *(f"allowed_batch_sizes: {size}" for size in sizes),
    ]
    return "\n".join(lines) + "\n"


def monitoring_config() -> str:
    """Returns the text of a `--monitoring_config_file` that publishes metrics for Prometheus on the REST port."""
    return f'prometheus_config {{\n  enable: true\n  path: "{METRICS_PATH}"\n}}\n'


def memory_mib(model_nbytes: int) -> int:
    """Estimates the memory of one server in MiB, for models of so many bytes.

    Two copies of the models, as a new version is loaded beside the old one; a fifth more for loading, TensorFlow
    Serving's own estimate; and half a GiB for the server and its requests.
    """
    return 512 + -(-model_nbytes * 12 // (5 * _MIB))


CONFIG_DIRECTORY = "/config"
NAME = "tensorflow-serving"
CONFIG_FILES = (CONFIG_FILE, BATCHING_FILE, MONITORING_FILE)
_GRPC_PORT, _REST_PORT = 8500, 8501


def server_arguments() -> list[str]:
    """Returns the arguments of `tensorflow_model_server` that read the files of a kit."""
    return [
        f"--model_config_file={CONFIG_DIRECTORY}/{CONFIG_FILE}",
        LABELS_ARGUMENT,
        "--enable_batching=true",
        f"--batching_parameters_file={CONFIG_DIRECTORY}/{BATCHING_FILE}",
        f"--monitoring_config_file={CONFIG_DIRECTORY}/{MONITORING_FILE}",
        # On by default, and open to everyone who reaches the port.
        "--enable_profiler=false",
    ]


def health_script(model_name: str, port: int = _REST_PORT) -> str:
    """Returns a line of bash that succeeds if a version of the model is available, for an image without curl and wget.

    The REST API opens once every model is loaded, so one model speaks for all.
    """
    request = rf"GET /v1/models/{model_name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    # In quotes, as the answer has it: a proxy's UNAVAILABLE is no good sign.
    return f"exec 3<>/dev/tcp/127.0.0.1/{port} && printf '{request}' >&3 && grep -q '\"AVAILABLE\"' <&3"


def compose_file(models: Sequence[ExportedModel], folder: Path, options: KitOptions, memory_mib: int) -> dict[str, Any]:
    """Builds a Compose file for one machine: loopback ports, everything mounted read-only, no privileges.

    The server runs as the owner of the models, so that nobody else need be able to read them.
    """
    mounts = [_mount(model.base_path, f"{options.models_directory}/{model.name}") for model in models]
    service = {
        "image": options.image,
        "command": server_arguments(),
        "ports": [f"127.0.0.1:{options.grpc_port}:{_GRPC_PORT}", f"127.0.0.1:{options.rest_port}:{_REST_PORT}"],
        "volumes": [*mounts, _mount(folder, CONFIG_DIRECTORY)],
        "user": owner(models[0].base_path),
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "cpus": options.cpus,
        "mem_limit": f"{2 * memory_mib}m",
        "restart": "unless-stopped",
        "healthcheck": {
            # Compose would read a single dollar sign as a variable; the script has none.
            "test": ["CMD", "bash", "-c", health_script(models[0].name)],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": "120s",
        },
    }
    return {"services": {NAME: service}}


def kustomization() -> dict[str, Any]:
    """Puts the files of the kit into a ConfigMap named after their content, so that a change starts new servers."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["kubernetes.yaml"],
        "configMapGenerator": [{"name": NAME, "files": list(CONFIG_FILES)}],
    }


def kubernetes_manifests(models: Sequence[ExportedModel], options: KitOptions, memory_mib: int) -> list[dict[str, Any]]:
    """Builds a Deployment, its Service and its PodDisruptionBudget; the models are on a volume, read-only."""
    labels = {"app.kubernetes.io/name": NAME}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME, "labels": labels},
        "spec": {
            "replicas": options.replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {
                        "prometheus.io/scrape": "true",
                        "prometheus.io/port": str(_REST_PORT),
                        "prometheus.io/path": METRICS_PATH,
                    },
                },
                "spec": _pod(models[0].name, options, memory_mib),
            },
        },
    }
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in _ports()]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "labels": labels},
        "spec": {"selector": labels, "ports": ports},
    }
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": NAME, "labels": labels},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }
    return [deployment, service, budget]


def _pod(model_name: str, options: KitOptions, memory_mib: int) -> dict[str, Any]:
    status = f"/v1/models/{model_name}"
    return {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": NOBODY,
            "runAsGroup": NOBODY,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": NAME,
                "image": options.image,
                "args": server_arguments(),
                "ports": [{"name": name, "containerPort": port} for name, port in _ports()],
                "startupProbe": _probe(status, period=5, failures=120),
                # The status is there for a version that is not loaded too; metadata is not.
                "readinessProbe": _probe(f"{status}/metadata", period=5, failures=2),
                "livenessProbe": _probe(status, period=10, failures=6),
                "resources": {
                    "requests": {"cpu": str(options.cpus), "memory": f"{memory_mib}Mi"},
                    "limits": {"memory": f"{2 * memory_mib}Mi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    {"name": "models", "mountPath": options.models_directory, "readOnly": True},
                    {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
                    {"name": "scratch", "mountPath": "/tmp"},
                ],
            }
        ],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": options.volume_claim, "readOnly": True}},
            {"name": "config", "configMap": {"name": NAME}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }


def _probe(path: str, *, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "rest"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _ports() -> list[tuple[str, int]]:
    return [("grpc", _GRPC_PORT), ("rest", _REST_PORT)]


def _mount(source: Path, target: str) -> dict[str, Any]:
    # Compose takes a dollar sign for the start of a variable.
    return {"type": "bind", "source": str(source).replace("$", "$$"), "target": target, "read_only": True}
