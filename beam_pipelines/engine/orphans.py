"""Workers that end with their job, also where the job is killed and cannot tell them."""

import functools
import os
import select
import threading
from pathlib import Path

# A worker, the shell that Beam starts workers with, the job.
_GENERATIONS = 3


def end_with(job: int) -> None:
    """Ends this process once a job's process is gone, if this is a worker that the job has started.

    Nothing happens in the job itself, nor in workers of a cluster, which no job has started.

    Args:
      job: number of the job's process.
    """
    if os.getpid() != job and hasattr(os, "pidfd_open"):
        _watch(job)


@functools.cache
def _watch(job: int) -> None:
    try:
        watched = os.pidfd_open(job)
    except OSError:
        return
    # Only now: the number may have become another process's before it was opened, and that one is no ancestor.
    if job not in _ancestors():
        os.close(watched)
        return
    threading.Thread(target=_wait, args=(watched,), name="end with the job", daemon=True).start()


def _wait(watched: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    # Other threads may be anywhere, and nobody is left to be told.
    os._exit(1)


def _ancestors() -> list[int]:
    found = [os.getpid()]
    while len(found) <= _GENERATIONS and found[-1] > 1:
        lines = Path(f"/proc/{found[-1]}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        found += [int(line.split()[1]) for line in lines if line.startswith("PPid:")][:1] or [0]
    return found[1:]
