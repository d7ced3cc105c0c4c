"""Rolling a version out: on a running server, and in the `models.config` that servers start with."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from serving.client.answers import VersionState
from serving.client.calls import ServerError
from serving.client.grpc_client import GrpcClient
from serving.production.exports import check_versions
from serving.production.models_config import to_proto, write_model_config_file
from serving.production.rollout_plan import Rollout, plan_promotion, plan_rollout
from serving.tf_serving import read_model_config_file
from tff_pdp.errors import ServingError

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
    """Moves the labels of one model, on a running server if there is one, and in its `models.config`.

    Where the server fails on the way, it is sent the list of before again. The file is written last, so that a server
    that starts anew serves what it did.

    Args:
      config_file: the full list of models that the server was started with.
      base_path: folder of the model's versions on this machine, to see that they are there.
      model_name: the model.
      stable: the version of the label `stable`; None to promote the canary.
      canary: the version of the label `canary`, or None for no such label.
      address: `host:port` of the server's gRPC API; None to write the file only.
      timeout_seconds: how long the server may take to load the versions.

    Raises:
      ServingError: the file or a version is missing, there is nothing to promote, the server refuses the list or
        does not load a version in time, or the file cannot be written.
    """
    models = read_model_config_file(config_file)
    plan = plan_promotion(models, model_name) if stable is None else plan_rollout(models, model_name, stable, canary)
    check_versions(base_path, plan.versions)
    if address is not None:
        with GrpcClient(address, timeout_seconds) as client:
            _apply(client, plan, time.monotonic() + timeout_seconds)
    try:
        write_model_config_file(plan.final, config_file)
    except OSError as error:
        served = f"; {address} serves the new list already" if address else ""
        raise ServingError(f"{config_file} cannot be written: {error}. Roll out again once it can{served}.") from error
    return plan


def _apply(client: GrpcClient, plan: Rollout, end: float) -> None:
    states = _states(client, plan)
    available = [state.version for state in states.values() if state.available]
    failed = _failures(states)
    try:
        client.reload_config(to_proto(plan.loading(available)))
        # The call waits for models that are new to the server, not for new versions of one that it has.
        _wait_for_versions(client, plan, failed, end)
        client.reload_config(to_proto(plan.final))
    except BaseException as error:
        _send_back(client, plan, error)


def _wait_for_versions(client: GrpcClient, plan: Rollout, failed_before: Iterable[int], end: float) -> None:
    """Returns when every version is available.

    Raises:
      ServingError: one of them failed to load, or the time is over.
    """
    acts_until = time.monotonic() + _ACTS_WITHIN_SECONDS
    # Their files may have been repaired, and the server not have looked yet.
    in_doubt = set(failed_before)
    while True:
        # Read first: what the server says after this moment counts.
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
    """Gives the server the list of before, and raises what went wrong and what became of it."""
    reason = f"{str(error).rstrip('.') or 'The rollout was stopped'}."
    try:
        client.reload_config(to_proto(plan.before))
    except ServingError as second:
        raise ServingError(
            f"{reason} The list of before could not be sent back either: {str(second).rstrip('.')}. Versions and "
            f"labels at {client.address} may be others now; it serves as before when it is started again, since "
            "models.config is as it was."
        ) from error
    if isinstance(error, ServingError):
        raise ServingError(
            f"{reason} The list of before was sent back: versions, labels and models.config are as they were."
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
    """Why versions ended, of those that failed."""
    return {version: state.error_message for version, state in states.items() if state.error_code != "OK"}
