"""Moves labels to other versions, on a running server and in the `models.config` that servers start with.

Requests name the label `stable` or `canary` in place of a version; a rollout moves these labels to new versions.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from serving.client.answers import VersionState
from serving.client.calls import ServerError
from serving.client.grpc_client import GrpcClient
from serving.production.exports import check_versions
from serving.tf_serving import ServedModel, Specific, read_model_config_file, to_proto, write_model_config_file
from tff_pdp.errors import ServingError

STABLE, CANARY = "stable", "canary"


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A change of one model's versions and labels: the server's whole list of models before and after the change."""

    model_name: str
    before: Sequence[ServedModel]
    final: Sequence[ServedModel]

    @property
    def versions(self) -> tuple[int, ...]:
        """Returns the model's versions after the change."""
        return _named_versions(_entry(self.final, self.model_name))

    def loading(self, available: Iterable[int]) -> list[ServedModel]:
        """Returns the whole list of models during the change, with old and new versions, and with the old labels.

        A label can only be moved to a version that is loaded. Therefore the server first loads the new versions, and
        keeps the old versions. `available` has the versions that the server has loaded. The server keeps these
        versions, too, even if no list names them.
        """
        before = _entry(self.before, self.model_name)
        versions = {*self.versions, *_named_versions(before), *before.labels.values(), *available}
        return _replaced(self.before, dataclasses.replace(before, policy=_specific(versions)))


def plan_rollout(
    models: Sequence[ServedModel], model_name: str, stable: int | None, canary: int | None = None
) -> Rollout:
    """Plans to move the labels `stable` and `canary` to the given versions, and to unload versions without a label.

    If `stable` is None, the present canary becomes stable; if `canary` is None, no version will be the canary.

    Raises:
      ServingError: the model is not in the list, or `stable` is None and the model has no canary.
    """
    entry = _entry(models, model_name)
    if stable is None:
        stable = entry.labels.get(CANARY)
    if stable is None:
        raise ServingError(f"Model {model_name!r} has no {CANARY} to promote; name a {CANARY} first.")
    labels = {label: version for label, version in entry.labels.items() if label not in (STABLE, CANARY)}
    labels[STABLE] = stable
    if canary is not None:
        labels[CANARY] = canary
    after = dataclasses.replace(entry, policy=_specific(labels.values()), labels=labels)
    return Rollout(model_name, models, _replaced(models, after))


def _entry(models: Sequence[ServedModel], model_name: str) -> ServedModel:
    for model in models:
        if model.name == model_name:
            return model
    raise ServingError(f"Model {model_name!r} is not in the list of {', '.join(model.name for model in models)}.")


def _named_versions(model: ServedModel) -> tuple[int, ...]:
    return model.policy.versions if isinstance(model.policy, Specific) else ()


def _specific(versions: Iterable[int]) -> Specific:
    return Specific(tuple(sorted(set(versions))))


def _replaced(models: Sequence[ServedModel], changed: ServedModel) -> list[ServedModel]:
    return [changed if model.name == changed.name else model for model in models]


DEFAULT_TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.5
# TensorFlow Serving takes a list at once and acts on it when it next looks at the disk, by default within a second.
_ACTS_WITHIN_SECONDS = 3.0


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
    """Moves the labels of one model, on a running server if there is one, and in the server's `models.config`.

    If loading the versions or moving the labels fails, the server gets its old list again. The file is written last: a
    server that restarts earlier starts with the old list.

    Args:
      config_file: file with the whole list of models that the server was started with.
      base_path: folder of the model's versions on this machine, where the new versions must be.
      model_name: model's name in the list.
      stable: version for the label `stable`; None to promote the canary.
      canary: version for the label `canary`; with None, no version has this label afterwards.
      address: `host:port` of the server's gRPC API; None to write the file only.
      timeout_seconds: seconds that the server may take to load the versions.

    Raises:
      ServingError: the file or a version is missing, there is nothing to promote, the server refuses the list or
        does not load a version in time, or the file cannot be written.
    """
    models = read_model_config_file(config_file)
    plan = plan_rollout(models, model_name, stable, canary)
    check_versions(base_path, plan.versions)
    if address is not None:
        with GrpcClient(address, timeout_seconds) as client:
            _apply(client, plan, time.monotonic() + timeout_seconds)
    try:
        write_model_config_file(plan.final, config_file)
    except OSError as error:
        served = f"; {address} serves the new list already" if address else ""
        raise ServingError(f"{config_file} cannot be written: {error}. Fix this and roll out again{served}.") from error
    return plan


def _apply(client: GrpcClient, plan: Rollout, end: float) -> None:
    states = _states(client, plan)
    available = [state.version for state in states.values() if state.available]
    failed = _failures(states)
    try:
        client.reload_config(to_proto(plan.loading(available)))
        # The call waits for models that are new to the server, not for new versions of known models.
        _wait_for_versions(client, plan, failed, end)
        client.reload_config(to_proto(plan.final))
    except BaseException as error:
        _send_back(client, plan, error)


def _wait_for_versions(client: GrpcClient, plan: Rollout, failed_before: Iterable[int], end: float) -> None:
    """Waits until every version is available; raises ServingError if one fails to load, or the time is over."""
    acts_until = time.monotonic() + _ACTS_WITHIN_SECONDS
    # Files of these versions may have been repaired, and the server may not have looked yet.
    in_doubt = set(failed_before)
    while True:
        # The time is read before the states, since only later states count.
        acted = time.monotonic() >= acts_until
        states = _states(client, plan)
        failures = _failures(states)
        in_doubt = set() if acted else in_doubt & failures.keys()
        for version in plan.versions:
            if version in failures and version not in in_doubt:
                reason = failures[version].rstrip(".")
                raise ServingError(f"{client.address} cannot load version {version} of {plan.model_name!r}: {reason}.")
        missing = [version for version in plan.versions if version not in states or not states[version].available]
        if not missing:
            return
        if time.monotonic() >= end:
            numbers = ", ".join(map(str, missing))
            raise ServingError(f"{client.address} did not load version {numbers} of {plan.model_name!r} in time.")
        time.sleep(_POLL_SECONDS)


def _send_back(client: GrpcClient, plan: Rollout, error: BaseException) -> NoReturn:
    """Sends the server the old list, and raises the error with the outcome."""
    reason = f"{str(error).rstrip('.') or 'The rollout was stopped'}."
    try:
        client.reload_config(to_proto(plan.before))
    except ServingError as second:
        raise ServingError(
            f"{reason} The old list could not be sent back either: {str(second).rstrip('.')}. The server at "
            f"{client.address} may have other versions and labels now; a restart brings the old ones back, since "
            "models.config is unchanged."
        ) from error
    if isinstance(error, ServingError):
        raise ServingError(
            f"{reason} The old list was sent back: versions, labels and models.config are unchanged."
        ) from error
    raise error


def _states(client: GrpcClient, plan: Rollout) -> dict[int, VersionState]:
    try:
        return {state.version: state for state in client.status(plan.model_name)}
    except ServerError as error:
        if error.code != "NOT_FOUND":
            raise
        return {}


def _failures(states: Mapping[int, VersionState]) -> dict[int, str]:
    """Returns the error messages of the versions that failed."""
    return {version: state.error_message for version, state in states.items() if state.error_code != "OK"}
