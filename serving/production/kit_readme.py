"""The README of a kit: how to start the servers, ask them, and change versions."""

from collections.abc import Sequence

from serving.production.containers import NAME
from serving.production.exports import ExportedModel
from serving.production.image import CONFIG_FILE, METRICS_PATH, owner
from serving.production.kit_options import BATCHING_FILE, MONITORING_FILE, KitOptions

_TEXT = """\
# Serving {title}

Written by `serving deploy` for `{image}`. What writes these files is tested without containers: they parse,
they agree with each other, and a server reads the list of models. Try them on a machine that does not matter first.

| file | for |
|---|---|
| `{config}` | which models, versions and labels: always the full list |
| `{batching}` | how requests are merged; at most {max_batch_size} examples in one |
| `{monitoring}` | metrics for Prometheus at `{metrics}` on the REST port |
| `docker-compose.yaml` | one machine; ports on its loopback address only |
| `kustomization.yaml`, `kubernetes.yaml` | {replicas} servers in Kubernetes |

The server has **no authentication, and no encryption**: put it behind something that has both. Exports are
personal data.

## One machine

    docker compose up -d
    docker compose ps         # healthy once all models are loaded

The server runs as user {user}, who must be able to read the models and this folder.

## Kubernetes

Copy every base path to the volume of the PersistentVolumeClaim `{claim}`, as `<model>/<version>/`, readable by user
65534: {sizes}. All {replicas} servers mount it at once, on different machines, and one more while they are replaced:
its access mode must be ReadOnlyMany or ReadWriteMany. With ReadWriteOnce, servers on other machines never start.

    kubectl apply -k .
    kubectl rollout status deployment/{name}

gRPC keeps one connection, and so one server: for several, let callers find them by a headless Service and balance
themselves, or put a proxy that understands gRPC in between.

## Asking

    curl http://127.0.0.1:{rest_port}/v1/models/{model}
    curl http://127.0.0.1:{rest_port}/v1/models/{model}/metadata

`docs/serving.md` of the project has requests of all kinds, and the client in Python.

## Versions

With no versions named, the newest is served, and a newer export replaces it when it appears. To move by labels:

    alias rollout="python -m serving rollout BASE_PATH --model-name {model} --config {config}"
    rollout --stable 3 --canary 4 --address 127.0.0.1:{grpc_port}
    rollout --promote --address 127.0.0.1:{grpc_port}

A request that names no version goes to the highest that is loaded, which is the canary: ask for `/labels/stable`. In
Kubernetes leave `--address` out, since it reaches one server only, and `kubectl apply -k .` again: new servers
start with the new list.

## Memory

Each server asks for {memory} MiB and may use twice that: two copies of every version that is served, as a new one is
loaded beside the old one, and half a GiB. Memory of unloaded versions may stay with the process; watch it, and restart
where it grows.
"""


def readme(models: Sequence[ExportedModel], options: KitOptions, memory_mib: int) -> str:
    """The text of the file."""
    names = [model.name for model in models]
    return _TEXT.format(
        title=names[0] if len(names) == 1 else f"{len(names)} models",
        image=options.image,
        user=owner(models[0].base_path),
        config=CONFIG_FILE,
        batching=BATCHING_FILE,
        monitoring=MONITORING_FILE,
        metrics=METRICS_PATH,
        max_batch_size=options.max_batch_size,
        replicas=options.replicas,
        claim=options.volume_claim,
        sizes=f"{sum(max(model.nbytes.values()) for model in models) / 2**20:.1f} MiB for one version of each",
        name=NAME,
        rest_port=options.rest_port,
        grpc_port=options.grpc_port,
        model=names[0],
        memory=memory_mib,
    )
