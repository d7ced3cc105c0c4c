"""Reads and writes a checkpoint without its arrays: round, ledger and key, with digests that show damage.

`tff_pdp.training.checkpoint` writes and reads whole checkpoints; this module needs no TensorFlow.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tff_pdp.digests import Prefix, as_text, prefix_of, read_json, write_json
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.run_key import KEY_BYTES, RunKey
from tff_pdp.files import remove_tree
from tff_pdp.journal import GENESIS
from tff_pdp.privacy.accounting.ledger import Ledger

FORMAT_VERSION = 3
# Checkpoints without digests.
UNDIGESTED_VERSION = 2
CONTENT_FILE, KEY_FILE, ARRAYS_FILE = "checkpoint.json", "run_key.json", "state.npz"


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The state of the files beside a checkpoint, as it was when the checkpoint was saved.

    Attributes:
      charges_head: chain hash of the last line of the run's charges.
      earlier_head: chain hash of the last line of the record of earlier releases.
      files: for each file, by path in the run's folder, length and digest of the content that the file had then.
    """

    charges_head: str = GENESIS
    earlier_head: str = GENESIS
    files: Mapping[str, Prefix] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint, with its arrays or without.

    Attributes:
      round_number: number of completed rounds.
      config_hash: digest, by `run_key.keyed`, of the settings and data that the run was started with.
      ledger: ledger of the spending so far; None without privacy.
      run_key: the run's secret; None once it has been destroyed.
      surroundings: state of the files beside the checkpoint; None for checkpoints of the first version.
    """

    round_number: int
    config_hash: str
    ledger: Ledger | None
    run_key: RunKey | None
    surroundings: Surroundings | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredCheckpoint(Saved):
    """A checkpoint without its arrays.

    Attributes:
      folder: folder of the checkpoint.
      structure: nested dicts and lists of the state, with the name of each array in its position.
    """

    folder: Path
    structure: Mapping[str, Any]


def complete(folder: Path) -> list[Path]:
    """Lists the complete checkpoints in a folder, oldest first."""
    return sorted(folder.glob("round_*"))


def newest_round(folder: Path) -> int:
    """Returns the round of the newest complete checkpoint in a folder; 0 without a checkpoint."""
    found = complete(folder)
    return int(found[-1].name.removeprefix("round_")) if found else 0


def sweep(folder: Path) -> None:
    """Removes files that a process left when it was killed while writing or removing a checkpoint."""
    for leftover in folder.glob(".round_*"):
        remove_tree(leftover)


def write_files(staging: Path, saved: Saved, run_key: RunKey, structure: Mapping[str, Any]) -> None:
    """Writes a checkpoint's files except the arrays into `staging`; arguments are attributes of `StoredCheckpoint`."""
    key = {"secret": run_key.secret.hex(), "is_test_only": run_key.is_test_only, "attempt": run_key.attempt}
    key |= {"salt": run_key.salt} if run_key.salt else {}
    (staging / KEY_FILE).touch(mode=0o600)
    (staging / KEY_FILE).write_text(json.dumps(key))
    content = {
        "format_version": FORMAT_VERSION,
        **_content(saved, run_key, saved.surroundings or Surroundings()),
        "structure": structure,
        "files": {name: list(prefix_of(staging / name)) for name in (ARRAYS_FILE, KEY_FILE)},
    }
    (staging / CONTENT_FILE).write_text(as_text(content))


def read_files(folder: Path, *, with_arrays: bool = True) -> StoredCheckpoint:
    """Reads a checkpoint without its arrays; `with_arrays` decides if the digest of the arrays is checked.

    Raises:
      DataError: a file is missing or damaged, or belongs to another round.
    """
    content = read_json(folder / CONTENT_FILE, undigested=(UNDIGESTED_VERSION,))
    try:
        version = content["format_version"]
        if version not in (FORMAT_VERSION, UNDIGESTED_VERSION):
            raise DataError(
                f"{folder} has format version {version!r}; only {UNDIGESTED_VERSION} and {FORMAT_VERSION} can be read"
            )
        is_digested = version == FORMAT_VERSION
        if is_digested:
            for name, prefix in content["files"].items():
                if with_arrays or name != ARRAYS_FILE:
                    _check_whole(folder / name, Prefix(*prefix))
        stored = StoredCheckpoint(
            folder=folder,
            round_number=content["round_number"],
            config_hash=content["config_hash"],
            ledger=Ledger.from_json(content["ledger"]) if content["ledger"] else None,
            run_key=None if content.get("is_sealed") else _read_key(folder / KEY_FILE),
            structure=content["structure"],
            surroundings=_surroundings(content) if is_digested else None,
        )
        is_own_key = (
            not is_digested or stored.run_key is None or stored.run_key.fingerprint() == content["key_fingerprint"]
        )
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise DataError(f"{folder / CONTENT_FILE} is damaged ({type(error).__name__}: {error})") from None
    if folder.name != folder_name(stored.round_number):
        raise DataError(f"{folder} holds round {stored.round_number}: a checkpoint was renamed or damaged")
    if not is_own_key:
        raise DataError(f"{folder / KEY_FILE} is not the key of this run")
    return stored


def seal(folder: Path, surroundings: Surroundings) -> None:
    """Replaces a checkpoint atomically by a checkpoint without key and arrays; the caller destroys the old files.

    `surroundings` has the head of the charges that include the line `sealed`. Errors are as in `read_files`.
    """
    stored = read_files(folder, with_arrays=False)
    if stored.run_key is None:
        return
    write_json(
        folder / CONTENT_FILE,
        {
            "format_version": FORMAT_VERSION,
            "is_sealed": True,
            **_content(stored, stored.run_key, surroundings),
            # The structure names clients, and arrays that are gone.
            "structure": {},
            "files": {},
        },
    )


def newest(folder: Path, *, with_arrays: bool = True) -> StoredCheckpoint | None:
    """Reads the newest checkpoint in a folder by `read_files`; None without a checkpoint."""
    found = complete(folder)
    return read_files(found[-1], with_arrays=with_arrays) if found else None


def newest_of(folder: Path, parts: Sequence[str]) -> list[StoredCheckpoint]:
    """Reads the newest checkpoint, if any, in each subfolder of a run's folder; arrays are not checked."""
    found = (newest(folder / part, with_arrays=False) for part in parts)
    return [stored for stored in found if stored is not None]


def folder_name(round_number: int) -> str:
    """Returns the folder name of a round's checkpoint."""
    return f"round_{round_number:06d}"


def _content(saved: Saved, run_key: RunKey, surroundings: Surroundings) -> dict[str, Any]:
    """Returns the content of a checkpoint, sealed or not."""
    return {
        "round_number": saved.round_number,
        "config_hash": saved.config_hash,
        "ledger": saved.ledger.to_json() if saved.ledger else None,
        "key_fingerprint": run_key.fingerprint(),
        "charges_head": surroundings.charges_head,
        "earlier_head": surroundings.earlier_head,
        "files_beside": {name: list(prefix) for name, prefix in surroundings.files.items()},
    }


def _check_whole(path: Path, expected: Prefix) -> None:
    if not path.is_file():
        raise DataError(f"{path} is missing; remove its folder to use the previous checkpoint")
    if prefix_of(path) != expected:
        raise DataError(f"{path} is damaged; remove its folder to use the previous checkpoint")


def _surroundings(content: Mapping[str, Any]) -> Surroundings:
    files = {name: Prefix(*prefix) for name, prefix in content["files_beside"].items()}
    return Surroundings(content["charges_head"], content["earlier_head"], files)


def _read_key(path: Path) -> RunKey:
    try:
        key = json.loads(path.read_bytes())
        secret, is_test_only = bytes.fromhex(key["secret"]), key["is_test_only"]
        if len(secret) != KEY_BYTES or not isinstance(is_test_only, bool):
            raise ValueError("no key")
    except FileNotFoundError:
        raise DataError(f"{path} is missing: restore it from a copy") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}): restore it from a copy") from None
    return RunKey(secret, is_test_only, key.get("attempt", 0), key.get("salt", ""))
