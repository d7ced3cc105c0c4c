"""Which models lie below a folder, and how large their versions are."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from serving.saved_model import layout
from tff_pdp.errors import ServingError


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """One base path.

    Attributes:
      name: the name it is served under.
      base_path: folder of its versions.
      nbytes: bytes of each complete version, by number, oldest first.
    """

    name: str
    base_path: Path
    nbytes: Mapping[int, int]


def find_models(paths: Iterable[Path]) -> list[ExportedModel]:
    """Finds every base path that holds a complete version, among paths and the folders right below them.

    A version counts if all files of its manifest are there; `serving verify` checks what they hold.

    Raises:
      ServingError: a path holds no complete version, or two base paths have the same name, which they are served under.
    """
    found: dict[str, ExportedModel] = {}
    for path in paths:
        models = [model for base_path in _base_paths(path) for model in _exported(base_path)]
        if not models:
            raise ServingError(f"{path} holds no complete version; export a model there first.")
        for model in models:
            if model.name in found:
                raise ServingError(
                    f"{found[model.name].base_path} and {model.base_path} would both be served as {model.name!r}; "
                    "deploy them apart, or rename one folder."
                )
            found[model.name] = model
    return list(found.values())


def check_versions(base_path: Path, versions: Iterable[int]) -> None:
    """Refuses versions that are not there, which TensorFlow Serving would wait for without end.

    Raises:
      ServingError: naming them.
    """
    complete = complete_versions(base_path)
    if missing := sorted(set(versions) - set(complete)):
        raise ServingError(
            f"{base_path} holds no complete version {', '.join(map(str, missing))}; it has "
            f"{', '.join(map(str, complete)) or 'none'}."
        )


def complete_versions(base_path: Path) -> dict[int, int]:
    """The bytes of each complete version of a base path, by number, oldest first.

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


def _exported(base_path: Path) -> list[ExportedModel]:
    versions = complete_versions(base_path)
    if not versions:
        return []
    layout.check_model_name(base_path.name)
    return [ExportedModel(base_path.name, base_path, versions)]


def _nbytes(export_dir: Path) -> int | None:
    """Bytes of the files in the manifest, or None where one is missing or there is no manifest."""
    try:
        manifest = json.loads((export_dir / layout.MANIFEST_FILE).read_text(encoding="utf-8"))
        return sum((export_dir / name).stat().st_size for name in manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
