"""The folder a job works in before its output has a name: what a killed job leaves never looks complete."""

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, SHARD_FOLDER, SUCCESS_FILE
from tff_pdp.errors import DataError

_SOURCE_REPORTS = ".sources"


@contextlib.contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """An empty hidden folder beside `output`, locked for this process and removed at the end.

    What a killed job left in it is cleared by the next job for the same output.

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
    try:
        for leftover in staging.iterdir():
            _remove(leftover)
        for name in (SHARD_FOLDER, DEAD_LETTER_FOLDER, _SOURCE_REPORTS):
            (staging / name).mkdir()
        yield staging
    finally:
        # Once published, the name may already belong to the next job.
        if staging.exists() and os.path.samestat(os.fstat(descriptor), staging.stat()):
            shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def publish(staging: Path, output: Path) -> None:
    """Marks a dataset as finished and gives it its name, replacing what stands there."""
    shutil.rmtree(staging / _SOURCE_REPORTS)
    (staging / SUCCESS_FILE).touch()
    if output.exists():
        # Renamed first: a half-removed dataset under the output's name must not look complete.
        replaced = output.with_name(f".{output.name}.replaced")
        _remove(replaced)
        output.rename(replaced)
        staging.rename(output)
        _remove(replaced)
    else:
        staging.rename(output)


def keep_dead_letters(staging: Path, destination: Path) -> None:
    """Moves the dead letters of a failing job out of the staging folder, replacing those of an earlier job."""
    _remove(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(staging / DEAD_LETTER_FOLDER, destination)


def report_source(staging: Path, source: str, error: str) -> None:
    """Records that a worker has dealt with a source file; a non-empty `error` says why it could not be used."""
    (staging / _SOURCE_REPORTS / source).write_text(error, encoding="utf-8")


def source_errors(staging: Path) -> list[str]:
    """The errors of all source files that could not be used, in the order of the files' names."""
    reports = sorted((staging / _SOURCE_REPORTS).iterdir())
    return [error for error in (report.read_text(encoding="utf-8") for report in reports) if error]


@contextlib.contextmanager
def progress_bar(staging: Path, num_sources: int, num_shards: int) -> Iterator[None]:
    """Shows how many files are read and shards written, from what lies in the staging folder.

    A runner blocks until the job is over and its workers may be other processes, so the disk is what can be watched.
    """
    finished = threading.Event()
    with tqdm(total=num_sources + num_shards, desc="read and write", unit="file") as bar:

        def watch() -> None:
            while not finished.wait(0.2):
                refresh()

        def refresh() -> None:
            shards = sum(1 for _ in (staging / SHARD_FOLDER).glob("*.tfrecord"))
            bar.n = sum(1 for _ in (staging / _SOURCE_REPORTS).iterdir()) + shards
            bar.refresh()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            finished.set()
            watcher.join()
            refresh()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
