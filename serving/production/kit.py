"""The production kit: one folder with everything that TensorFlow Serving needs to serve exports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from serving.production import containers
from serving.production.exports import ExportedModel, check_versions, find_models
from serving.production.image import CONFIG_FILE
from serving.production.kit_options import (
    BATCHING_FILE,
    MONITORING_FILE,
    KitOptions,
    batching_parameters,
    memory_mib,
    monitoring_config,
)
from serving.production.kit_readme import readme
from serving.production.models_config import write_model_config_file
from serving.saved_model import layout
from serving.tf_serving import Latest, ServedModel, Specific
from tff_pdp.errors import ServingError
from tff_pdp.files import replace_text

COMPOSE_FILE, KUBERNETES_FILE, KUSTOMIZATION_FILE = "docker-compose.yaml", "kubernetes.yaml", "kustomization.yaml"
README_FILE = "README.md"


def write_production_kit(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    model_name: str | None = None,
    versions: Sequence[int] = (),
    labels: Mapping[str, int] | None = None,
    replace: bool = False,
    options: KitOptions | None = None,
) -> list[Path]:
    """Writes `models.config`, batching and monitoring parameters, Compose and Kubernetes files, and how to use them.

    Args:
      paths: base paths, and folders of base paths, of which all that hold a complete version are listed.
      folder: where the kit is written; created if missing.
      model_name: the name of the one model, by default that of its base path's folder.
      versions: versions of the one model to serve; by default those with labels, or else always the newest.
      labels: version numbers of the one model by label.
      replace: whether a kit that is there may be replaced, and the versions and labels in it lost.
      options: everything else.

    Returns:
      The files.

    Raises:
      ServingError: a path holds no complete version, names clash, a version is missing, or the folder holds a kit.
    """
    options = options or KitOptions()
    folder = Path(folder).absolute()
    if (folder / CONFIG_FILE).exists() and not replace:
        raise ServingError(
            f"{folder} holds a {CONFIG_FILE}, with the versions and labels that are served. Use `serving rollout` to "
            "change those, or allow it to be replaced."
        )
    models = find_models(Path(path) for path in paths)
    labels = dict(labels or {})
    if (model_name or versions or labels) and len(models) != 1:
        raise ServingError(f"A name, versions or labels are for one model, but {len(models)} were found.")
    if model_name:
        layout.check_model_name(model_name)
        models = [ExportedModel(model_name, models[0].base_path, models[0].nbytes)]
    wanted = sorted({*versions, *labels.values()})
    check_versions(models[0].base_path, wanted)
    policy = Specific(tuple(wanted)) if wanted else Latest(1)
    served = [ServedModel(model.name, Path(options.models_directory) / model.name, policy, labels) for model in models]
    memory = memory_mib(sum(_served_nbytes(model, wanted) for model in models))
    folder.mkdir(parents=True, exist_ok=True)
    write_model_config_file(served, folder / CONFIG_FILE)
    texts = {
        BATCHING_FILE: batching_parameters(options),
        MONITORING_FILE: monitoring_config(),
        COMPOSE_FILE: _yaml(containers.compose_file(models, folder, options, memory)),
        KUSTOMIZATION_FILE: _yaml(containers.kustomization()),
        KUBERNETES_FILE: _yaml(*containers.kubernetes_manifests(models, options, memory)),
        README_FILE: readme(models, options, memory),
    }
    for name, text in texts.items():
        replace_text(folder / name, text)
    return [folder / name for name in (CONFIG_FILE, *texts)]


def _served_nbytes(model: ExportedModel, versions: Sequence[int]) -> int:
    return sum(model.nbytes[version] for version in versions or [max(model.nbytes)])


def _yaml(*documents: Any) -> str:
    return yaml.dump_all(documents, Dumper=_WithoutAnchors, sort_keys=False, width=1000)


class _WithoutAnchors(yaml.SafeDumper):
    """Writes out what occurs twice, which people change in one place."""

    def ignore_aliases(self, data: Any) -> bool:
        """All of them."""
        return True
