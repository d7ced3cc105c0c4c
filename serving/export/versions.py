"""Publishing: an export is staged beside its final place, then renamed; a version number is never used twice."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from serving.saved_model import layout
from tff_pdp.errors import ServingError
from tff_pdp.files import sync

# Survives the deletion of old versions, so that their numbers are not handed out again to other weights.
LAST_VERSION_FILE = ".last_version"
STAGING_SUFFIX = ".tmp"


@contextlib.contextmanager
def staged_version(base_path: Path, version: int | None = None) -> Iterator[tuple[int, Path]]:
    """Yields a version number and an empty staging directory; publishes it if the block succeeds, else removes it.

    The staging directory is `<version>.tmp`, which servers ignore. A process that is killed leaves only that behind.

    Args:
      base_path: directory of all versions of the model; created if missing.
      version: the number to publish, or `None` for one above the highest ever used.

    Raises:
      ServingError: if the number is not above every number ever used, or another export holds it.
    """
    base_path.mkdir(parents=True, exist_ok=True)
    last = last_version(base_path)
    version = last + 1 if version is None else version
    if not last < version <= layout.MAX_VERSION:
        raise ServingError(
            f"Version {version} cannot be published under {base_path}: version {last} was, and a number is never "
            "reused nor lowered, because servers pick the highest. Leave the version out to get the next one."
        )
    staging = base_path / f"{version}{STAGING_SUFFIX}"
    try:
        staging.mkdir()
    except FileExistsError as error:
        raise ServingError(
            f"{staging} exists: another export is running, or one was killed. Remove it if none is running."
        ) from error
    try:
        yield version, staging
        _publish(staging, base_path / str(version), version)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def last_version(base_path: Path) -> int:
    """The highest version number ever published or being published under a base path; 0 if none."""
    try:
        recorded = int((base_path / LAST_VERSION_FILE).read_text(encoding="ascii"))
    except FileNotFoundError:
        recorded = 0
    except ValueError as error:
        raise ServingError(f"{base_path / LAST_VERSION_FILE} does not hold a number; restore or remove it.") from error
    staging = [path.stem for path in base_path.glob(f"*{STAGING_SUFFIX}")]
    return max([recorded, *layout.published_versions(base_path), *(int(name) for name in staging if name.isdecimal())])


def _publish(staging: Path, target: Path, version: int) -> None:
    """Records the number, then makes the version visible: a crash in between wastes a number, never reuses one."""
    record = target.parent / LAST_VERSION_FILE
    temporary = record.with_name(f"{LAST_VERSION_FILE}{STAGING_SUFFIX}{os.getpid()}")
    temporary.write_text(f"{version}\n", encoding="ascii")
    temporary.replace(record)
    for path in (*staging.rglob("*"), staging):
        sync(path)
    if target.exists():
        raise ServingError(f"{target} was published by another export meanwhile; export again.")
    staging.rename(target)
    sync(target.parent)
