"""Finds exported models and their versions' sizes; writes a `models.config` and a command that serves the models."""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from serving import tf_serving
from serving.saved_model import layout
from serving.tf_serving import CONFIG_FILE, MODELS_DIRECTORY, ServedModel
from tff_pdp.errors import ServingError


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """A model: its name, the folder of its versions, and the size in bytes of each complete version, by number."""

    name: str
    base_path: Path
    nbytes: Mapping[int, int]


def find_models(paths: Iterable[Path]) -> list[ExportedModel]:
    """Finds models with a complete version; each path is a model's base path, or a folder of several base paths.

    A version is complete if all files that its manifest lists exist; `serving verify` checks the files' content.

    Raises:
      ServingError: a path has no complete version, or two base paths have folders of the same name.
    """
    found: dict[str, ExportedModel] = {}
    for path in paths:
        complete = {base_path: complete_versions(base_path) for base_path in _base_paths(path)}
        models = [ExportedModel(base_path.name, base_path, sizes) for base_path, sizes in complete.items() if sizes]
        if not models:
            raise ServingError(f"{path} holds no complete version; export a model there first.")
        for model in models:
            layout.check_model_name(model.name)
            if model.name in found:
                raise ServingError(
                    f"{found[model.name].base_path} and {model.base_path} would both be served as {model.name!r}; "
                    "deploy them apart, or rename one folder."
                )
            found[model.name] = model
    return list(found.values())


def check_versions(base_path: Path, versions: Iterable[int]) -> None:
    """Raises ServingError if a version is missing or incomplete: TensorFlow Serving would wait forever for it."""
    complete = complete_versions(base_path)
    if missing := sorted(set(versions) - set(complete)):
        raise ServingError(
            f"{base_path} holds no complete version {', '.join(map(str, missing))}; it has "
            f"{', '.join(map(str, complete)) or 'none'}."
        )


def complete_versions(base_path: Path) -> dict[int, int]:
    """Returns the size in bytes of each complete version of a base path, by version number, oldest first.

    Raises:
      ServingError: the folder cannot be read.
    """
    sizes = {version: _nbytes(directory) for version, directory in layout.published_versions(base_path).items()}
    return {version: nbytes for version, nbytes in sizes.items() if nbytes is not None}


def _base_paths(path: Path) -> list[Path]:
    path = path.absolute()
    if layout.published_versions(path):
        return [path]
    return sorted(child for child in path.iterdir() if layout.is_plain_directory(child))


def _nbytes(export_dir: Path) -> int | None:
    """Returns the bytes of the files in the manifest, or None where a file or the manifest is missing."""
    try:
        manifest = json.loads((export_dir / layout.MANIFEST_FILE).read_text(encoding="utf-8"))
        return sum((export_dir / name).stat().st_size for name in manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_models_config(base_path: Path, model_name: str) -> Path:
    """Writes `models.config` into the base path, for a server that has the base path mounted as `/models/<model_name>`.

    The file lies beside the versions, so that one mount contains both; servers that look for versions ignore the file.
    If the file exists and lists the model, the file is not changed, so that the labels of a rollout are kept.

    Raises:
      ServingError: the name cannot be served, or there is no complete version, for which TensorFlow Serving would
        wait forever.
    """
    layout.check_model_name(model_name)
    if not complete_versions(base_path):
        raise ServingError(f"{base_path} holds no version that is complete; export the model first.")
    path = base_path / CONFIG_FILE
    if not path.exists() or model_name not in [model.name for model in tf_serving.read_model_config_file(path)]:
        tf_serving.write_model_config_file([ServedModel(model_name, Path(MODELS_DIRECTORY) / model_name)], path)
    return path


def docker_command(folder: Path, name: str = "", arguments: Sequence[str] = ()) -> str:
    """Returns a shell command that serves the models in a folder's `models.config` on this machine's loopback address.

    If `name` is given, `folder` must contain the versions of one model, and is mounted as `/models/<name>`. If `name`
    is empty, `folder` must contain the folders of several models, and is mounted as `/models`. The mount is read-only.

    The server runs as the folder's owner (as nobody if the owner is root), so that no other user needs the right to
    read the folder. `arguments` are further arguments of the server.
    """
    inside = Path(MODELS_DIRECTORY) / name
    return shlex.join(
        [
            *("docker", "run", "--rm", "--read-only", "--tmpfs=/tmp", f"--user={tf_serving.owner(folder)}"),
            *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *("-p", "127.0.0.1:8500:8500", "-p", "127.0.0.1:8501:8501"),
            *("--mount", f"type=bind,source={folder.absolute()},target={inside},readonly"),
            tf_serving.DOCKER_IMAGE,
            tf_serving.LABELS_ARGUMENT,
            *arguments,
            f"--model_config_file={inside}/{CONFIG_FILE}",
        ]
    )
