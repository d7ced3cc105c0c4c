"""Builds the files that servers in containers need: option files, a Compose file, and Kubernetes manifests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.production.exports import ExportedModel
from serving.production.options import KitOptions
from serving.tf_serving import CONFIG_FILE, DOCKER_IMAGE, LABELS_ARGUMENT, METRICS_PATH, MODELS_DIRECTORY, NOBODY, owner

BATCHING_FILE = "batching_parameters.txt"
MONITORING_FILE = "monitoring.config"
# Publishes metrics for Prometheus on the REST port.
MONITORING_CONFIG = f'prometheus_config {{\n  enable: true\n  path: "{METRICS_PATH}"\n}}\n'
# Ports in a container and, for docker, on its machine.
GRPC_PORT, REST_PORT = 8500, 8501
_PORTS = {"grpc": GRPC_PORT, "rest": REST_PORT}
_MIB = 2**20


def batching_parameters(options: KitOptions) -> str:
    """Returns the text of TensorFlow Serving's batching parameters, for the option `--batching_parameters_file`.

    Batches are padded to a power of two or to `max_batch_size`, so that the server runs batches of only a few sizes.
    """
    sizes = [*(2**power for power in range((options.max_batch_size - 1).bit_length())), options.max_batch_size]
    lines = [
        f"max_batch_size {{ value: {options.max_batch_size} }}",
        # How long a request may wait for others to be merged with.
        "batch_timeout_micros { value: 1000 }",
        # Requests beyond these are UNAVAILABLE, which our clients try again.
        "max_enqueued_batches { value: 100 }",
        f"num_batch_threads {{ value: {options.cpus} }}",
        # Fills batches up with parts of requests; a request above max_batch_size is refused all the same.
        "enable_large_batch_splitting { value: true }",
        *(f"allowed_batch_sizes: {size}" for size in sizes),
    ]
    return "\n".join(lines) + "\n"


def memory_mib(model_nbytes: int) -> int:
    """Estimates the memory of one server in MiB, for models of `model_nbytes` bytes.

    The estimate is two copies of the models (a new version is loaded beside the old one), a fifth more for loading
    (TensorFlow Serving's own estimate), and half a GiB for the server and its requests.
    """
    return 512 + -(-model_nbytes * 12 // (5 * _MIB))


CONFIG_DIRECTORY = "/config"
NAME = "tensorflow-serving"
_LABELS = {"app.kubernetes.io/name": NAME}
# Arguments of `tensorflow_model_server` that read the files of a kit.
_SERVER_ARGUMENTS = [
    f"--model_config_file={CONFIG_DIRECTORY}/{CONFIG_FILE}",
    LABELS_ARGUMENT,
    "--enable_batching=true",
    f"--batching_parameters_file={CONFIG_DIRECTORY}/{BATCHING_FILE}",
    f"--monitoring_config_file={CONFIG_DIRECTORY}/{MONITORING_FILE}",
    # On by default, and open to everyone who reaches the port.
    "--enable_profiler=false",
]


def health_script(model_name: str, port: int = REST_PORT) -> str:
    """Returns a line of bash that succeeds if a version of the model is available; needs neither curl nor wget.

    The REST API opens only when all models are loaded, so a check of one model is enough.
    """
    request = rf"GET /v1/models/{model_name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    # With the quotes of the answer, so that a proxy's UNAVAILABLE does not match.
    return f"exec 3<>/dev/tcp/127.0.0.1/{port} && printf '{request}' >&3 && grep -q '\"AVAILABLE\"' <&3"


def compose_file(models: Sequence[ExportedModel], folder: Path, options: KitOptions, memory_mib: int) -> dict[str, Any]:
    """Builds a Compose file for one machine: ports on loopback only, mounts that are read-only, and no privileges.

    The server runs as the user who owns the models, so that no other user needs the right to read them.
    """
    mounts = [_mount(model.base_path, f"{MODELS_DIRECTORY}/{model.name}") for model in models]
    service = {
        "image": DOCKER_IMAGE,
        "command": _SERVER_ARGUMENTS,
        "ports": [f"127.0.0.1:{port}:{port}" for port in _PORTS.values()],
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


# Puts the files of the kit into a ConfigMap named after their content, so that a change starts new servers.
KUSTOMIZATION = {
    "apiVersion": "kustomize.config.k8s.io/v1beta1",
    "kind": "Kustomization",
    "resources": ["kubernetes.yaml"],
    "configMapGenerator": [{"name": NAME, "files": [CONFIG_FILE, BATCHING_FILE, MONITORING_FILE]}],
}


def kubernetes_manifests(models: Sequence[ExportedModel], options: KitOptions, memory_mib: int) -> list[dict[str, Any]]:
    """Builds a Deployment, its Service and its PodDisruptionBudget; the models are on a volume mounted read-only."""
    deployment = {
        "replicas": options.replicas,
        "selector": {"matchLabels": _LABELS},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {
            "metadata": {
                "labels": _LABELS,
                "annotations": {
                    "prometheus.io/scrape": "true",
                    "prometheus.io/port": str(REST_PORT),
                    "prometheus.io/path": METRICS_PATH,
                },
            },
            "spec": _pod(models[0].name, options, memory_mib),
        },
    }
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in _PORTS.items()]
    return [
        _manifest("apps/v1", "Deployment", deployment),
        _manifest("v1", "Service", {"selector": _LABELS, "ports": ports}),
        _manifest("policy/v1", "PodDisruptionBudget", {"maxUnavailable": 1, "selector": {"matchLabels": _LABELS}}),
    ]


def _manifest(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": NAME, "labels": _LABELS}, "spec": spec}


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
                "image": DOCKER_IMAGE,
                "args": _SERVER_ARGUMENTS,
                "ports": [{"name": name, "containerPort": port} for name, port in _PORTS.items()],
                "startupProbe": _probe(status, period=5, failures=120),
                # The status also exists for a version that is not loaded; metadata does not.
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
                    {"name": "models", "mountPath": MODELS_DIRECTORY, "readOnly": True},
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


def _mount(source: Path, target: str) -> dict[str, Any]:
    # Compose takes a dollar sign for the start of a variable.
    return {"type": "bind", "source": str(source).replace("$", "$$"), "target": target, "read_only": True}
