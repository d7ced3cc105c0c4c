"""What a rollout by labels changes: callers ask for `stable` or `canary`, and the labels move between versions."""

import dataclasses
from collections.abc import Iterable, Sequence

from serving.tf_serving import ServedModel, Specific
from tff_pdp.errors import ServingError

STABLE, CANARY = "stable", "canary"


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A change of one model's versions and labels in a list of all models.

    Attributes:
      model_name: the model.
      before: the full list of before.
      final: the full list afterwards.
    """

    model_name: str
    before: Sequence[ServedModel]
    final: Sequence[ServedModel]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions afterwards."""
        return _named_versions(_entry(self.final, self.model_name))

    def loading(self, available: Iterable[int]) -> list[ServedModel]:
        """The full list in between: the versions of before and after, under the labels of before.

        A label cannot be moved to a version that is not loaded. So the new versions are loaded first, beside those
        that answer meanwhile.

        Args:
          available: the versions that the server has loaded, which a list of before need not name.
        """
        before = _entry(self.before, self.model_name)
        versions = {*self.versions, *_named_versions(before), *before.labels.values(), *available}
        return _replaced(self.before, dataclasses.replace(before, policy=_specific(versions)))


def plan_rollout(models: Sequence[ServedModel], model_name: str, stable: int, canary: int | None = None) -> Rollout:
    """Plans to serve these versions under these labels, and none besides but those with labels of other names.

    Raises:
      ServingError: the model is not in the list.
    """
    entry = _entry(models, model_name)
    labels = {label: version for label, version in entry.labels.items() if label not in (STABLE, CANARY)}
    labels[STABLE] = stable
    if canary is not None:
        labels[CANARY] = canary
    after = dataclasses.replace(entry, policy=_specific(labels.values()), labels=labels)
    return Rollout(model_name, models, _replaced(models, after))


def plan_promotion(models: Sequence[ServedModel], model_name: str) -> Rollout:
    """Plans to make the canary stable, and to stop serving the old version.

    Raises:
      ServingError: the model is not in the list or has no canary.
    """
    canary = _entry(models, model_name).labels.get(CANARY)
    if canary is None:
        raise ServingError(f"Model {model_name!r} has no {CANARY} to promote; name one first.")
    return plan_rollout(models, model_name, canary)


def _entry(models: Sequence[ServedModel], model_name: str) -> ServedModel:
    for model in models:
        if model.name == model_name:
            return model
    raise ServingError(f"Model {model_name!r} is not in the list; it has {', '.join(model.name for model in models)}.")


def _named_versions(model: ServedModel) -> tuple[int, ...]:
    return model.policy.versions if isinstance(model.policy, Specific) else ()


def _specific(versions: Iterable[int]) -> Specific:
    return Specific(tuple(sorted(set(versions))))


def _replaced(models: Sequence[ServedModel], changed: ServedModel) -> list[ServedModel]:
    return [changed if model.name == changed.name else model for model in models]
