"""Rolling a version out by labels: callers ask for `stable` or `canary`, and the labels move between versions."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from serving.client.calls import ServerError
from serving.client.grpc_client import GrpcClient
from serving.production.exports import check_versions
from serving.production.models_config import to_proto, write_model_config_file
from serving.server.model_config import ServedModel, Specific, read_model_config_file
from tff_pdp.errors import ServingError

STABLE, CANARY = "stable", "canary"
DEFAULT_TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A change of one model's versions and labels in a list of all models.

    Attributes:
      model_name: the model.
      loading: the full list with the versions of before and after, and the labels of before.
      final: the full list afterwards.
    """

    model_name: str
    loading: Sequence[ServedModel]
    final: Sequence[ServedModel]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions afterwards."""
        return _versions(next(model for model in self.final if model.name == self.model_name))


def plan_rollout(models: Sequence[ServedModel], model_name: str, stable: int, canary: int | None = None) -> Rollout:
    """Plans to serve exactly these versions under these labels.

    A label cannot be moved to a version that is not loaded, so that the versions are loaded first, beside the old ones.

    Raises:
      ServingError: the model is not in the list.
    """
    labels = {STABLE: stable} if canary is None else {STABLE: stable, CANARY: canary}
    versions = set(labels.values())
    entry = _entry(models, model_name)
    before = dataclasses.replace(entry, policy=_specific(versions | set(_versions(entry))))
    after = dataclasses.replace(entry, policy=_specific(versions), labels=labels)
    return Rollout(model_name, _replaced(models, before), _replaced(models, after))


def plan_promotion(models: Sequence[ServedModel], model_name: str) -> Rollout:
    """Plans to make the canary stable, and to stop serving the old version.

    Raises:
      ServingError: the model is not in the list or has no canary.
    """
    canary = _entry(models, model_name).labels.get(CANARY)
    if canary is None:
        raise ServingError(f"Model {model_name!r} has no {CANARY} to promote; name one first.")
    return plan_rollout(models, model_name, canary)


def roll_out(
    config_file: Path,
    base_path: Path,
    model_name: str,
    *,
    stable: int | None = None,
    canary: int | None = None,
    address: str | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Rollout:
    """Moves the labels of one model, on a running server if there is one, and in its `models.config`.

    The file is written last: whatever fails before, a server that starts anew serves what it did.

    Args:
      config_file: the full list of models that the server was started with.
      base_path: folder of the model's versions on this machine, to see that they are there.
      model_name: the model.
      stable: the version of the label `stable`; None to promote the canary.
      canary: the version of the label `canary`, or None for no such label.
      address: `host:port` of the server's gRPC API; None to write the file only.
      timeout_seconds: how long the server may take to load the versions.

    Raises:
      ServingError: the file or a version is missing, there is nothing to promote, or the server refuses the list or
        does not load a version in time.
    """
    models = read_model_config_file(config_file)
    plan = plan_promotion(models, model_name) if stable is None else plan_rollout(models, model_name, stable, canary)
    check_versions(base_path, plan.versions)
    if address is not None:
        with GrpcClient(address, timeout_seconds) as client:
            _apply(client, plan, time.monotonic() + timeout_seconds)
    write_model_config_file(plan.final, config_file)
    return plan


def _apply(client: GrpcClient, plan: Rollout, end: float) -> None:
    client.reload_config(to_proto(plan.loading))
    # The call waits for models that are new to the server, not for new versions of one that it has.
    while missing := _missing(client, plan):
        if time.monotonic() >= end:
            raise ServingError(
                f"{client.address} did not load version {', '.join(map(str, missing))} of {plan.model_name!r} in time. "
                "Labels and models.config are as they were."
            )
        time.sleep(_POLL_SECONDS)
    client.reload_config(to_proto(plan.final))


def _missing(client: GrpcClient, plan: Rollout) -> list[int]:
    """Which versions are not available yet.

    Raises:
      ServingError: one of them failed to load.
    """
    try:
        states = {state.version: state for state in client.status(plan.model_name)}
    except ServerError as error:
        if error.code != "NOT_FOUND":
            raise
        states = {}
    for version in plan.versions:
        state = states.get(version)
        if state is not None and state.error_code != "OK":
            raise ServingError(
                f"{client.address} cannot load version {version} of {plan.model_name!r}: {state.error_message}. "
                "Labels and models.config are as they were."
            )
    return [version for version in plan.versions if version not in states or not states[version].available]


def _entry(models: Sequence[ServedModel], model_name: str) -> ServedModel:
    for model in models:
        if model.name == model_name:
            return model
    raise ServingError(f"Model {model_name!r} is not in the list; it has {', '.join(model.name for model in models)}.")


def _versions(model: ServedModel) -> tuple[int, ...]:
    return model.policy.versions if isinstance(model.policy, Specific) else ()


def _specific(versions: set[int]) -> Specific:
    return Specific(tuple(sorted(versions)))


def _replaced(models: Sequence[ServedModel], changed: ServedModel) -> list[ServedModel]:
    return [changed if model.name == changed.name else model for model in models]
