"""Which files anybody opens or reads, as the kernel reports it: reads by TensorFlow's C++ included."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

IN_ACCESS, IN_MODIFY, IN_OPEN, IN_CREATE = 0x1, 0x2, 0x20, 0x100
_EVENT = struct.Struct("iIII")


@contextlib.contextmanager
def watching(*paths: Path) -> Iterator[Callable[[], list[str]]]:
    """Watches files and folders (not what is below their folders) until the block ends.

    Yields:
      A function that returns what was opened, read or written since it was last called.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert descriptor >= 0
    try:
        watched = {}
        for path in paths:
            watch = libc.inotify_add_watch(descriptor, os.fsencode(path), IN_ACCESS | IN_MODIFY | IN_OPEN | IN_CREATE)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            watched[watch] = path

        def opened() -> list[str]:
            found = []
            with contextlib.suppress(BlockingIOError):
                while events := os.read(descriptor, 1 << 16):
                    while events:
                        watch, mask, _, length = _EVENT.unpack_from(events)
                        name = events[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode()
                        found.append(f"{watched[watch] / name}: {mask:#x}")
                        events = events[_EVENT.size + length :]
            return found

        yield opened
    finally:
        os.close(descriptor)
