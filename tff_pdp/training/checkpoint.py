"""Checkpoints: server state, client states, ledger, run key and round number as one folder, published by rename."""

import collections
import dataclasses
import json
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.errors import DataError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.files import sync
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.training.client_store.states import is_store
from tff_pdp.training.client_store.store import ClientStore

FORMAT_VERSION = 2
KEPT = 2


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All that a run is after `round_number` rounds; continuing from it gives the same bits as never having stopped.

    Attributes:
      round_number: rounds completed.
      server_state: nest of arrays.
      client_ids: whose states follow.
      client_states: nests of arrays, in this order; or a store of users' states, which is saved by itself.
      ledger: what has been spent; None without privacy.
      run_key: the run's secret.
      config_hash: of the settings the run was started with.
      auto_prox: nest of arrays, what is known for setting lambda (`tff_pdp.algorithms.auto_prox.lambdas`); empty where
        it is given.
    """

    round_number: int
    server_state: Any
    client_ids: tuple[str, ...]
    client_states: Any
    ledger: Ledger | None
    run_key: RunKey
    config_hash: str
    auto_prox: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint and removes all but the newest few; a folder with a round's name is always complete."""
    final = folder / f"round_{checkpoint.round_number:06d}"
    staging = folder / f".{final.name}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    # Server states hold the seeds of the noise, client states are computed from raw data.
    staging.chmod(0o700)
    arrays: dict[str, np.ndarray] = {}
    structure = {
        "server": _flatten(checkpoint.server_state, "server", arrays),
        "auto_prox": _flatten(checkpoint.auto_prox, "auto_prox", arrays),
        "clients": None
        if is_store(checkpoint.client_states)
        else {
            client_id: _flatten(state, f"client/{index}", arrays)
            for index, (client_id, state) in enumerate(
                zip(checkpoint.client_ids, checkpoint.client_states, strict=True)
            )
        },
    }
    np.savez(staging / "state.npz", **arrays)  # type: ignore[arg-type]
    content = {
        "format_version": FORMAT_VERSION,
        "round_number": checkpoint.round_number,
        "config_hash": checkpoint.config_hash,
        "ledger": checkpoint.ledger.to_json() if checkpoint.ledger else None,
        "structure": structure,
    }
    (staging / "checkpoint.json").write_text(json.dumps(content))
    key = {"secret": checkpoint.run_key.secret.hex(), "is_test_only": checkpoint.run_key.is_test_only}
    descriptor = os.open(staging / "run_key.json", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(key, file)
    for path in staging.iterdir():
        path.chmod(0o600)
        sync(path)
    # A run stopped between this round's training and its successor's repeats the round to the same bits, so what is
    # already there under this name is the same checkpoint.
    shutil.rmtree(final, ignore_errors=True)
    staging.rename(final)
    sync(folder)
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old)
    return final


def load_latest(folder: Path) -> Checkpoint | None:
    """Reads the newest checkpoint, or returns None where there is none.

    Of users, whose states are in a store, it names nobody and has no states: `with_store` enters both.

    Raises:
      DataError: the newest checkpoint cannot be read.
    """
    complete = _complete(folder)
    if not complete:
        return None
    latest = complete[-1]
    try:
        content = json.loads((latest / "checkpoint.json").read_text())
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(f"{latest}: checkpoint format {version}, this version reads {FORMAT_VERSION}")
        key = json.loads((latest / "run_key.json").read_text())
        with np.load(latest / "state.npz", allow_pickle=False) as arrays:
            structure = content["structure"]
            server_state = _unflatten(structure["server"], arrays)
            clients = structure["clients"]
            client_states = None if clients is None else [_unflatten(state, arrays) for state in clients.values()]
            auto_prox = _unflatten(structure["auto_prox"], arrays)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{latest}: the checkpoint cannot be read ({error}); remove that folder to use the one before"
        ) from None
    return Checkpoint(
        round_number=content["round_number"],
        server_state=server_state,
        client_ids=tuple(clients or ()),
        client_states=client_states,
        ledger=Ledger.from_json(content["ledger"]) if content["ledger"] else None,
        run_key=RunKey(bytes.fromhex(key["secret"]), key["is_test_only"]),
        config_hash=content["config_hash"],
        auto_prox=auto_prox,
    )


def oldest_kept(folder: Path) -> int:
    """The round of the oldest checkpoint."""
    return int(_complete(folder)[0].name.removeprefix("round_"))


def with_store(checkpoint: Checkpoint, client_ids: Sequence[str], store: ClientStore) -> Checkpoint:
    """A loaded checkpoint with the store that users' states are in."""
    return dataclasses.replace(checkpoint, client_ids=tuple(client_ids), client_states=store)


def _complete(folder: Path) -> list[Path]:
    return sorted(folder.glob("round_*"))


def _flatten(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Moves the arrays of a nest into `arrays`, and returns the nest with their names in their place."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _flatten(member, f"{name}/{key}", arrays) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_flatten(member, f"{name}/{index}", arrays) for index, member in enumerate(value)]
    # Slashes would make folders inside the archive's names.
    key = name.replace("/", "|")
    arrays[key] = np.asarray(value)
    return key


def _unflatten(structure: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(structure, dict):
        return collections.OrderedDict((key, _unflatten(member, arrays)) for key, member in structure.items())
    if isinstance(structure, list):
        return [_unflatten(member, arrays) for member in structure]
    return arrays[structure]
