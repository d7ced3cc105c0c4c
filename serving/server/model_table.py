"""Which models and versions take requests at one moment: an immutable table, replaced as a whole."""

import dataclasses
from collections.abc import Mapping, Sequence

import grpc

from serving.errors import RequestError, invalid_argument
from serving.server.loaded_version import LoadedVersion
from serving.tf_serving import ServedModel

Versions = Mapping[int, LoadedVersion]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What a request asks for: a model, and a version by number or label, or its newest."""

    name: str
    version: int | None = None
    label: str | None = None


class ModelTable:
    """The models that are served, and the versions of each that are loaded.

    Attributes:
      models: the models, in the order they were given.
      versions: the loaded versions of each model, by name and number.
    """

    def __init__(self, models: Sequence[ServedModel], versions: Mapping[str, Versions]):
        self.models = tuple(models)
        self.versions = {model.name: versions[model.name] for model in models}
        self._by_name = {model.name: model for model in models}

    def _resolve(self, spec: ModelSpec) -> ModelSpec:
        """Replaces a label by the version it stands for."""
        if not spec.name:
            raise invalid_argument("ModelSpec has no name specified.")
        if spec.label is None:
            return spec
        model = self._by_name.get(spec.name)
        if model is None or spec.label not in model.labels:
            raise invalid_argument(f"Unrecognized servable version label: {spec.label}")
        return ModelSpec(spec.name, model.labels[spec.label])

    def find(self, spec: ModelSpec) -> LoadedVersion:
        """Returns the version that a request asks for.

        Raises:
          RequestError: INVALID_ARGUMENT without a name or with an unknown label; NOT_FOUND if no such version is
            loaded.
        """
        spec = self._resolve(spec)
        versions = self.versions.get(spec.name, {})
        number = max(versions, default=None) if spec.version is None else spec.version
        if number is None or number not in versions:
            wanted = f"Latest({spec.name})" if spec.version is None else f"Specific({spec.name}, {spec.version})"
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"Servable not found for request: {wanted}")
        return versions[number]

    def reusable_versions(self, model: ServedModel) -> Versions:
        """Returns the loaded versions of a model; none if it has moved, as the same numbers are then other models."""
        known = self._by_name.get(model.name)
        return self.versions[model.name] if known is not None and known.base_path == model.base_path else {}

    def holds(self, version: LoadedVersion) -> bool:
        """True if this very version is in the table, not another of the same number."""
        return self.versions.get(version.name, {}).get(version.version) is version

    def lacking(self, other: "ModelTable") -> list[LoadedVersion]:
        """Returns the versions that another table holds and this one does not."""
        return [version for version in other.loaded() if not self.holds(version)]

    def loaded(self) -> list[LoadedVersion]:
        """Returns the loaded versions of all models."""
        return [version for versions in self.versions.values() for version in versions.values()]

    def check_labels(self, models: Sequence[ServedModel]) -> None:
        """Checks that the labels of a list of models name versions of this table.

        Raises:
          RequestError: FAILED_PRECONDITION for the first that does not.
        """
        for model in models:
            for version in model.labels.values():
                if version not in self.versions.get(model.name, {}):
                    raise RequestError(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"Request to assign label to version {version} of model {model.name}, which is not currently "
                        "available for inference",
                    )
