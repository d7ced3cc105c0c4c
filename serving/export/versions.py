"""Publishes versions: writes an export to a staging folder, then renames the folder; never uses a number twice."""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NewType

from serving.saved_model import layout
from tff_pdp.digests import as_text, from_text
from tff_pdp.errors import ServingError
from tff_pdp.files import replace_text, sync
from tff_pdp.lock import only_writer

# Survives the deletion of old versions, so that other weights never get their numbers.
LAST_VERSION_FILE = ".last_version"
STAGING_SUFFIX = ".tmp"

_logger = logging.getLogger(__name__)


# Directory of all versions of a model, while `hold` keeps other processes from exporting to it.
HeldBasePath = NewType("HeldBasePath", Path)


@contextlib.contextmanager
def hold(base_path: Path) -> Iterator[HeldBasePath]:
    """Locks a base path until the block ends, so that no other process exports to it; creates the path if missing.

    If you build a version from an older version, lock the path before you read the older version. Otherwise another
    process could publish a version with further clients in between, and your version would lack these clients. The lock
    ends with the process, even if the process is killed.

    Raises:
      DataError: another process has locked the path.
    """
    base_path.mkdir(parents=True, exist_ok=True)
    with only_writer(base_path):
        yield HeldBasePath(base_path)


@contextlib.contextmanager
def staged_version(held: HeldBasePath) -> Iterator[tuple[int, Path]]:
    """Yields the next version's number and an empty staging directory, and publishes the directory after the block.

    If the block raises an error, the directory is removed instead. The directory's name, `<version>.tmp`, hides the
    directory from servers. If the process is killed, the directory stays, with all clients' weights, until the next
    export removes it.

    Raises:
      ServingError: the highest possible version number is used already, the record of the last number is damaged, a
        killed export's directory cannot be removed, or a version was copied to the base path during the block.
    """
    _remove_abandoned(held)
    last = last_version(held)
    version = last + 1
    if version > layout.MAX_VERSION:
        raise ServingError(
            f"Nothing more can be published under {held}: the highest number, {last}, is used. Numbers are never "
            "reused or lowered, because servers pick the highest."
        )
    staging = held / f"{version}{STAGING_SUFFIX}"
    staging.mkdir()
    try:
        yield version, staging
        _publish(staging, held / str(version), version)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def last_version(base_path: Path) -> int:
    """Returns the highest version number that was ever published under a base path; 0 before the first version."""
    try:
        stored = (base_path / LAST_VERSION_FILE).read_bytes()
        # Files of the first version hold the number alone.
        recorded = int(stored) if stored.strip().isdigit() else int(from_text(stored)["last_version"])
    except FileNotFoundError:
        recorded = 0
    except (ValueError, KeyError, TypeError) as error:
        raise ServingError(f"{base_path / LAST_VERSION_FILE} does not hold a number; restore or remove it.") from error
    return max([recorded, *layout.published_versions(base_path)])


def _remove_abandoned(base_path: Path) -> None:
    """Removes the staging directories of killed processes: no other process exports while the path is held."""
    for path in base_path.glob(f"*{STAGING_SUFFIX}"):
        if path.stem.isdecimal() and layout.is_plain_directory(path):
            _logger.warning("%s is removed: the process that wrote it was stopped before it published it", path)
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise ServingError(f"{path} holds clients' weights and cannot be removed: {error}.") from error


def _publish(staging: Path, target: Path, version: int) -> None:
    """Records the number, then makes the version visible: a crash in between wastes a number, never reuses one."""
    # Exports hold the path, but a version may have been copied there.
    if (last := last_version(target.parent)) >= version:
        raise ServingError(f"Version {last} was put under {target.parent} meanwhile; export again.")
    record = target.parent / LAST_VERSION_FILE
    replace_text(record, as_text({"format_version": 1, "last_version": version}))
    for path in (record, *staging.rglob("*"), staging):
        sync(path)
    staging.rename(target)
    sync(target.parent)
