"""The folder a job works in before its output has a name: what a killed job leaves never looks complete."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from beam_pipelines.engine.tasks import REPORT_FOLDER
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, SHARD_FOLDER, SUCCESS_FILE
from tff_pdp.errors import DataError, UserError
from tff_pdp.files import is_attempt

# Index rows of one shard each, until there is one index.
INDEX_FOLDER = ".index"
_RESUME_FILE = ".resume"
_PUBLISHED_FOLDERS = (SHARD_FOLDER, DEAD_LETTER_FOLDER)


@contextlib.contextmanager
def staging_folder(output: Path, resume_key: str) -> Iterator[Path]:
    """A hidden folder beside `output`, locked for this process and removed once the job has ended.

    What a killed job left in it is there again for the next job with the same key, and cleared for any other. A job
    that ends with an error of its input leaves nothing.

    Args:
      output: what the job will write.
      resume_key: equal for jobs that may go on with what the other has done; empty for one that begins anew.

    Raises:
      DataError: another job is writing the same output.
    """
    staging = output.parent / f".{output.name}.unfinished"
    staging.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        # The lock dies with the process. The folder is compared because its last owner may have just renamed it.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), staging.stat()):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(descriptor)
        raise DataError(f"{output}: another job is writing it; wait for that, or choose another --output") from error
    keeps = False
    try:
        _clear_unless(staging, resume_key)
        yield staging
    except UserError:
        raise
    except BaseException:
        keeps = bool(resume_key)
        raise
    finally:
        # Once published, the name may already belong to the next job.
        if not keeps and staging.exists() and os.path.samestat(os.fstat(descriptor), staging.stat()):
            shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def publish(staging: Path, output: Path) -> None:
    """Marks a dataset as finished and gives it its name, replacing what stands there."""
    # First: a job that goes on needs all of the others.
    remove(staging / _RESUME_FILE)
    published = {*_PUBLISHED_FOLDERS}
    for leftover in list(staging.iterdir()):
        if leftover.is_dir() and leftover.name not in published:
            remove(leftover)
    for path in [path for path in staging.rglob("*") if is_attempt(path)]:
        remove(path)
    (staging / SUCCESS_FILE).touch()
    if output.exists():
        # Renamed first: a half-removed dataset under the output's name must not look complete.
        replaced = output.with_name(f".{output.name}.replaced")
        remove(replaced)
        output.rename(replaced)
        staging.rename(output)
        remove(replaced)
    else:
        staging.rename(output)


def keep_dead_letters(staging: Path, destination: Path) -> None:
    """Moves the dead letters of a failing job out of the staging folder, replacing those of an earlier job.

    Raises:
      DataError: something else than dead letters is in the way.
    """
    if destination.exists() and not (
        destination.is_dir() and all(path.suffix == ".jsonl" for path in destination.iterdir())
    ):
        raise DataError(f"{destination}: holds more than dead letters; choose another --dead_letters or remove it")
    remove(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(staging / DEAD_LETTER_FOLDER, destination)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear_unless(staging: Path, resume_key: str) -> None:
    """Prepares the folder, and removes what lies there unless it was left under the same key."""
    # Files between stages are not flushed to disk: after a restart of the machine they may be there and be empty.
    boot = Path("/proc/sys/kernel/random/boot_id")
    key = f"{resume_key} {boot.read_text().strip() if boot.exists() else ''}"
    path = staging / _RESUME_FILE
    if not (resume_key and path.is_file() and path.read_text() == key):
        for leftover in staging.iterdir():
            remove(leftover)
        path.write_text(key)
    for name in (*_PUBLISHED_FOLDERS, INDEX_FOLDER, REPORT_FOLDER):
        (staging / name).mkdir(exist_ok=True)
