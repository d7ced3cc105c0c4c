"""Keeps what accountants worked out on disk, for later processes, and works out the costs of many silos side by side.

A bound on epsilon takes up to a second, and the search for a silo's noise asks for ten of them. All are functions of
public arguments, and every command of a run asks for the same ones again.
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
# Time of a further process until it has imported the accountants.
_SECONDS_TO_START = 2.0
_is_used: ContextVar[bool] = ContextVar("what accountants worked out is taken from disk", default=True)


def kept(encode: Callable[[T], Any], decode: Callable[[Any], T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Makes a decorator that keeps a function's results in memory and on disk.

    Guarantee: a result from disk was worked out by the same code and libraries for the same arguments; a damaged one is
      worked out anew.
    Assumes: the function's result follows from its arguments and the code of this package alone; whoever can write to
      the user's own cache can also change the code.

    Args:
      encode: a result as plain data for JSON.
      decode: the reverse.
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
    """Takes nothing from disk inside the block, and leaves nothing there: for checks of what was stated before."""
    token = _is_used.set(False)
    try:
        yield
    finally:
        _is_used.reset(token)


@cache
def folder() -> Path:
    """Returns the folder of results of this code and these libraries, in the user's cache (`$XDG_CACHE_HOME`)."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    digest.update(json.dumps({name: metadata.version(name) for name in _LIBRARIES}).encode())
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "tff_pdp" / "accounting" / digest.hexdigest()[:16]


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Returns the results of calls that ask accountants, in order; many long calls are shared among processes.

    Another process leaves its results on disk, where this one then finds them.

    Args:
      calls: can be pickled, and their results follow from their arguments alone.

    Raises:
      Whatever the first call to fail raises.
    """
    started = time.monotonic()
    results = [call() for call in calls[:1]]
    left = calls[1:]
    num_processes = min(len(os.sched_getaffinity(0)), len(left))
    seconds = (time.monotonic() - started) * len(left)
    if _is_used.get() and num_processes > 1 and seconds * (1 - 1 / num_processes) > _SECONDS_TO_START:
        others = [_Other(left[place::num_processes]) for place in range(1, num_processes)]
        try:
            for call in left[::num_processes]:
                call()
        finally:
            for other in others:
                other.wait()
    return results + [call() for call in left]


class _Other:
    """A process that makes some calls, for their results on disk; this process repeats those that fail."""

    def __init__(self, calls: Sequence[Callable[[], Any]]):
        # Not by `multiprocessing`, which runs a user's script again, unless that is written for it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            pickle.dump(list(calls), stdin)

    def wait(self) -> None:
        self._process.wait()


def _work() -> None:
    calls = pickle.load(sys.stdin.buffer)
    for call in calls:
        with contextlib.suppress(Exception):
            call()


if __name__ == "__main__":
    _work()
