"""Saves and loads checkpoints: states, ledger, run key and round number in one folder, published by rename."""

import collections
import dataclasses
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.files import discard, naming, sync
from tff_pdp.training.client_store.states import is_store
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import read_charges, sealed_sentence
from tff_pdp.training.record.checkpoint_files import ARRAYS_FILE, Saved, complete

KEPT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Saved):
    """The full state of a run after `round_number` rounds; a resumed run has the same bits as an uninterrupted one.

    On a GPU the bits are the same only under the conditions of `engines.devices.gpu_arithmetic`.

    Attributes:
      server_state: state of the server, a nest of arrays.
      client_ids: ids of the clients, in the order of `client_states`.
      client_states: for each client, a nest of arrays; or a store of all users' states, which is saved separately.
      run_key: the run's secret, never None.
      hook: state of the method's hook, a nest of arrays; empty without a hook.
    """

    server_state: Any
    client_ids: tuple[str, ...]
    client_states: Any
    run_key: RunKey
    hook: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def was_made_with(self, config_hash: str) -> bool:
        """Checks if the run was started with the settings and data whose digest, without a key, is `config_hash`."""
        return self.config_hash in (self.run_key.keyed(config_hash), config_hash)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint and removes all but the newest `KEPT`; folders named after rounds are always complete."""
    final = folder / checkpoint_files.folder_name(checkpoint.round_number)
    checkpoint_files.sweep(folder)
    staging = folder / f".{final.name}.tmp"
    staging.mkdir(parents=True)
    try:
        with naming(staging):
            _write(staging, checkpoint)
    except BaseException:
        # A full disk needs the space.
        shutil.rmtree(staging, ignore_errors=True)
        raise
    # A run stopped between this round's training and its successor's repeats the round to the same bits, so what is
    # already there under this name is the same checkpoint.
    discard(final)
    staging.rename(final)
    sync(folder)
    for old in complete(folder)[:-KEPT]:
        discard(old)
    return final


def _write(staging: Path, checkpoint: Checkpoint) -> None:
    # Server states hold the seeds of the noise, client states are computed from raw data.
    staging.chmod(0o700)
    arrays: dict[str, np.ndarray] = {}
    structure = {
        "server": _flatten(checkpoint.server_state, "server", arrays),
        "hook": _flatten(checkpoint.hook, "hook", arrays),
        "clients": None
        if is_store(checkpoint.client_states)
        else {
            client_id: _flatten(state, f"client/{index}", arrays)
            for index, (client_id, state) in enumerate(
                zip(checkpoint.client_ids, checkpoint.client_states, strict=True)
            )
        },
    }
    _write_arrays(staging / ARRAYS_FILE, arrays)
    checkpoint_files.write_files(staging, checkpoint, checkpoint.run_key, structure)
    for path in staging.iterdir():
        path.chmod(0o600)
        sync(path)
    sync(staging)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as `np.savez` does, which on a full disk leaves the archive open, and later fails once more."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def load_latest(folder: Path) -> Checkpoint | None:
    """Reads the newest checkpoint, or returns None if there is none.

    If users' states are in a store, the caller must fill in `client_ids` and `client_states`.

    Raises:
      DataError: a file of the newest checkpoint is missing or damaged, or belongs to another round.
      ConfigError: the run has been sealed.
    """
    charges = read_charges(folder.parent)
    if charges is not None and charges.is_sealed:
        raise ConfigError(sealed_sentence(folder.parent))
    stored = checkpoint_files.newest(folder)
    if stored is None:
        return None
    if stored.run_key is None:
        raise ConfigError(sealed_sentence(folder.parent))
    path = stored.folder / ARRAYS_FILE
    try:
        with np.load(path, allow_pickle=False) as arrays:
            server_state = _unflatten(stored.structure["server"], arrays)
            clients = stored.structure["clients"]
            client_states = None if clients is None else [_unflatten(state, arrays) for state in clients.values()]
            # Earlier versions had MR-MTL's hook alone, under its name.
            hook = _unflatten(stored.structure.get("hook", stored.structure.get("auto_prox")), arrays)
    # Errors of a damaged archive; checkpoints without digests may be damaged in any way.
    except (OSError, EOFError, ValueError, KeyError, TypeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}); remove its folder to use the previous checkpoint") from None
    return Checkpoint(
        round_number=stored.round_number,
        server_state=server_state,
        client_ids=tuple(clients or ()),
        client_states=client_states,
        ledger=stored.ledger,
        run_key=stored.run_key,
        config_hash=stored.config_hash,
        hook=hook,
        surroundings=stored.surroundings,
    )


def oldest_kept(folder: Path) -> int:
    """Returns the round number of the oldest checkpoint that is kept."""
    return int(complete(folder)[0].name.removeprefix("round_"))


def _flatten(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Moves the arrays of a nest into `arrays`, and returns the nest with the arrays' names in their places."""
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
