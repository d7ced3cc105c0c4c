"""Caches accountants' results on disk for later processes, and computes the costs of many silos in parallel.

A bound on epsilon takes up to a second, and the search for a silo's noise needs ten bounds. All are functions of public
arguments, and every command of a run needs the same bounds again.
"""

import contextlib
import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from tff_pdp.digests import as_text, from_text
from tff_pdp.files import atomic_file

T = TypeVar("T")

_LIBRARIES = ("dp-accounting", "numpy", "scipy")
# Time that a further process takes to import the accountants.
_SECONDS_TO_START = 2.0
_is_used: ContextVar[bool] = ContextVar("what accountants worked out is taken from disk", default=True)


def kept(encode: Callable[[T], Any], decode: Callable[[Any], T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Makes a decorator that caches a function's results in memory and on disk.

    Guarantee: a result from disk was computed by the same code and libraries for the same arguments; a damaged result
      is computed anew.
    Assumes: the function's result follows from its arguments and the code of this package alone; anyone who can write
      to the user's cache can also change the code.

    Args:
      encode: function that turns a result into JSON-serialisable data.
      decode: function that restores the result from the data of `encode`.
    """

    def decorator(function: Callable[..., T]) -> Callable[..., T]:
        @lru_cache(maxsize=4096)
        def worked_out(*arguments: Any) -> T:
            return function(*arguments)

        @lru_cache(maxsize=4096)
        def found_or_worked_out(*arguments: Any) -> T:
            # The repr of an event has all of its numbers, in full.
            key = hashlib.sha256(repr((function.__qualname__, arguments)).encode()).hexdigest()
            path = folder() / key[:2] / f"{key}.json"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                stored = from_text(path.read_bytes())
                if stored["key"] == key:
                    return decode(stored["result"])
            result = worked_out(*arguments)
            with contextlib.suppress(OSError):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with atomic_file(path, is_durable=False) as file:
                    file.write(as_text({"key": key, "result": encode(result)}).encode())
            return result

        def call(*arguments: Any) -> T:
            return (found_or_worked_out if _is_used.get() else worked_out)(*arguments)

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        return call

    return decorator


@contextlib.contextmanager
def worked_out_anew() -> Iterator[None]:
    """Disables the disk cache inside a `with` block, so that checks of earlier statements compute results anew."""
    token = _is_used.set(False)
    try:
        yield
    finally:
        _is_used.reset(token)


@cache
def folder() -> Path:
    """Returns the cache folder of the present code and library versions, under `$XDG_CACHE_HOME` or `~/.cache`."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    digest.update(json.dumps({name: metadata.version(name) for name in _LIBRARIES}).encode())
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "tff_pdp" / "accounting" / digest.hexdigest()[:16]


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs calls of accountants, in several processes if the calls take long, and returns the results in order.

    The other processes write results to the disk cache, from which this process reads the results.

    Args:
      calls: functions without arguments whose results depend on no state. Calls that cannot be pickled are made in this
        process.

    Raises:
      Exception: as raised by the first call that fails.
    """
    started = time.monotonic()
    results = [call() for call in calls[:1]]
    left = calls[1:]
    num_processes = min(len(os.sched_getaffinity(0)), len(left))
    seconds = (time.monotonic() - started) * len(left)
    if _is_used.get() and num_processes > 1 and seconds * (1 - 1 / num_processes) > _SECONDS_TO_START:
        others = list(filter(None, (_started(left[place::num_processes]) for place in range(1, num_processes))))
        try:
            for call in left[::num_processes]:
                call()
        finally:
            for other in others:
                other.wait()
    return results + [call() for call in left]


def _started(calls: Sequence[Callable[[], Any]]) -> subprocess.Popen[bytes] | None:
    """Starts a process that makes some calls, for their results on disk; this process repeats calls that fail."""
    try:
        content = pickle.dumps(list(calls))
    except (pickle.PicklingError, AttributeError, TypeError):
        # An argument of a class that other processes cannot import.
        return None
    # Not by `multiprocessing`, which runs a user's script again, unless that is written for it.
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(content)
    return process


def _work() -> None:
    calls = pickle.load(sys.stdin.buffer)
    for call in calls:
        with contextlib.suppress(Exception):
            call()


if __name__ == "__main__":
    _work()
