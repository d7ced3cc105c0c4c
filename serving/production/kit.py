"""Writes the production kit: a folder with a README and all files that TensorFlow Serving needs to serve exports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from serving import tf_serving
from serving.production import containers
from serving.production.containers import BATCHING_FILE, MONITORING_FILE, batching_parameters, memory_mib
from serving.production.exports import ExportedModel, check_versions, find_models
from serving.production.options import KitOptions
from serving.saved_model import layout
from serving.tf_serving import CONFIG_FILE, Latest, ServedModel, Specific
from tff_pdp.errors import ServingError
from tff_pdp.files import replace_text

COMPOSE_FILE, KUBERNETES_FILE, KUSTOMIZATION_FILE = "docker-compose.yaml", "kubernetes.yaml", "kustomization.yaml"
README_FILE = "README.md"


def write_production_kit(
    paths: Sequence[Path],
    folder: Path,
    *,
    model_name: str | None = None,
    versions: Sequence[int] = (),
    labels: Mapping[str, int] | None = None,
    replace: bool = False,
    options: KitOptions | None = None,
) -> list[Path]:
    """Writes `models.config`, batching and monitoring parameters, Compose and Kubernetes files, and a README.

    Args:
      paths: base paths, or folders of base paths; the kit serves every model with a complete version.
      folder: folder of the kit; created if missing.
      model_name: model's name in requests, for a single model; by default the name of the base path's folder.
      versions: versions to serve besides those in `labels`, for a single model. If both `versions` and `labels` are
        empty, the newest version is served.
      labels: version number for each label, for a single model.
      replace: whether to replace a kit that is in the folder already, whose versions and labels are then lost.
      options: sizes of the deployment; None for the defaults.

    Raises:
      ServingError: there is no complete version in a path, two models have the same name, a version is missing, or the
        folder has a kit already.
    """
    options = options or KitOptions()
    folder = folder.absolute()
    if (folder / CONFIG_FILE).exists() and not replace:
        raise ServingError(
            f"{folder} holds a {CONFIG_FILE}, with the versions and labels that are served. Use `serving rollout` to "
            "change versions and labels, or allow the kit to be replaced (--replace)."
        )
    models = find_models(paths)
    labels = dict(labels or {})
    if (model_name or versions or labels) and len(models) != 1:
        raise ServingError(f"A name, versions or labels are for a single model, but {len(models)} models were found.")
    if model_name:
        layout.check_model_name(model_name)
        models = [ExportedModel(model_name, models[0].base_path, models[0].nbytes)]
    wanted = sorted({*versions, *labels.values()})
    check_versions(models[0].base_path, wanted)
    policy = Specific(tuple(wanted)) if wanted else Latest(1)
    served = [
        ServedModel(model.name, Path(tf_serving.MODELS_DIRECTORY) / model.name, policy, labels) for model in models
    ]
    memory = memory_mib(sum(model.nbytes[one] for model in models for one in wanted or [max(model.nbytes)]))
    folder.mkdir(parents=True, exist_ok=True)
    tf_serving.write_model_config_file(served, folder / CONFIG_FILE)
    texts = {
        BATCHING_FILE: batching_parameters(options),
        MONITORING_FILE: containers.MONITORING_CONFIG,
        COMPOSE_FILE: _yaml(containers.compose_file(models, folder, options, memory)),
        KUSTOMIZATION_FILE: _yaml(containers.KUSTOMIZATION),
        KUBERNETES_FILE: _yaml(*containers.kubernetes_manifests(models, options, memory)),
        README_FILE: readme(models, options, memory),
    }
    for name, text in texts.items():
        replace_text(folder / name, text)
    return [folder / name for name in (CONFIG_FILE, *texts)]


def _yaml(*documents: Any) -> str:
    return yaml.dump_all(documents, Dumper=_WithoutAnchors, sort_keys=False, width=1000)


class _WithoutAnchors(yaml.SafeDumper):
    """Writes equal parts out in full, so that each can be changed by itself."""

    def ignore_aliases(self, data: Any) -> bool:
        """Ignores all aliases."""
        return True


_TEXT = """\
# Serving {title}

Written by `serving deploy` for `{image}`. The program's tests run no containers; they check that the files parse and
agree with each other, and that a server reads the list of models. First try the files on a test machine.

| file | content |
|---|---|
| `{config}` | the full list of models, versions and labels |
| `{batching}` | how requests are merged; a request has at most {max_batch_size} examples |
| `{monitoring}` | metrics for Prometheus at `{metrics}` on the REST port |
| `docker-compose.yaml` | one machine; ports on its loopback address only |
| `kustomization.yaml`, `kubernetes.yaml` | {replicas} servers in Kubernetes |

The server has **no authentication, and no encryption**: put it behind a proxy that has both. Exports are personal
data.

## One machine

    docker compose up -d
    docker compose ps         # healthy once all models are loaded

The server runs as user {user}, who must be able to read the models and this folder.

## Kubernetes

Copy every base path to the volume of the PersistentVolumeClaim `{claim}`, as `<model>/<version>/`, readable by user
65534: {sizes}. All {replicas} servers mount the volume at once, on different machines, and one more while servers are
replaced: the access mode must be ReadOnlyMany or ReadWriteMany. With ReadWriteOnce, servers on other machines never
start.

    kubectl apply -k .
    kubectl rollout status deployment/{name}

A gRPC client keeps one connection, and so asks one server. To use several servers, let clients find them by a headless
Service and balance requests themselves, or put a proxy that understands gRPC in between.

## Requests

    curl http://127.0.0.1:{rest_port}/v1/models/{model}
    curl http://127.0.0.1:{rest_port}/v1/models/{model}/metadata

`docs/serving.md` of the project has requests of all kinds, and the client in Python.

## Versions

If no versions are named, the newest version is served, and a newer export replaces it. To move labels:

    alias rollout="python -m serving rollout BASE_PATH --model-name {model} --config {config}"
    rollout --stable 3 --canary 4 --address 127.0.0.1:{grpc_port}
    rollout --promote --address 127.0.0.1:{grpc_port}

A request that names no version goes to the highest version that is loaded, which is the canary: ask for
`/labels/stable`. In Kubernetes leave `--address` out, since it reaches one server only, and run `kubectl apply -k .`
again: new servers start with the new list.

## Memory

Each server asks for {memory} MiB and may use twice that: two copies of every version that is served, as a new one is
loaded beside the old one, and half a GiB. The process may keep the memory of unloaded versions: watch it, and restart
the server if it grows.
"""


def readme(models: Sequence[ExportedModel], options: KitOptions, memory_mib: int) -> str:
    """Returns the text of the kit's README."""
    names = [model.name for model in models]
    return _TEXT.format(
        title=names[0] if len(names) == 1 else f"{len(names)} models",
        image=tf_serving.DOCKER_IMAGE,
        user=tf_serving.owner(models[0].base_path),
        config=CONFIG_FILE,
        batching=BATCHING_FILE,
        monitoring=MONITORING_FILE,
        metrics=tf_serving.METRICS_PATH,
        max_batch_size=options.max_batch_size,
        replicas=options.replicas,
        claim=options.volume_claim,
        sizes=f"{sum(max(model.nbytes.values()) for model in models) / 2**20:.1f} MiB for one version of each",
        name=containers.NAME,
        rest_port=containers.REST_PORT,
        grpc_port=containers.GRPC_PORT,
        model=names[0],
        memory=memory_mib,
    )
