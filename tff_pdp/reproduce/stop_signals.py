"""Ctrl-C and SIGTERM as something to wait for, in place of an exception at any moment."""

import contextlib
import os
import signal
import threading
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Within its context, SIGINT and SIGTERM only make `descriptor` readable; after it, they take their usual effect.

    An exception that a signal raises wherever the program happens to be can be lost there: Python ignores one that is
    raised in a destructor or in a weak reference's callback. And a signal that arrives just before a system call, after
    Python last looked for one, does not end that call. Waiting for a descriptor has neither gap.

    Signals that the process ignores stay ignored. Outside the main thread, to which Python gives signals, none arrives.

    Attributes:
      descriptor: readable from a signal's arrival until `received` is read.
    """

    def __init__(self):
        """Opens the descriptor."""
        self._received: int | None = None
        self._descriptors, self._handlers = contextlib.ExitStack(), contextlib.ExitStack()
        self.descriptor, self._written = os.pipe()
        for descriptor in (self.descriptor, self._written):
            os.set_blocking(descriptor, False)
            self._descriptors.callback(os.close, descriptor)

    @property
    def received(self) -> int | None:
        """The first of the signals that has arrived, or None."""
        with contextlib.suppress(BlockingIOError):
            # A byte for each signal that Python has a handler for, such as one for another size of the terminal.
            numbers = [number for number in os.read(self.descriptor, 1024) if number in _SIGNALS]
            self._received = self._received or next(iter(numbers), None)
        return self._received

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
            self._descriptors.callback(signal.set_wakeup_fd, before)
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    # Only for signals with a handler in Python the descriptor is written to.
                    self._handlers.callback(signal.signal, number, signal.signal(number, _do_nothing))
        return self

    def __exit__(self, *error: object) -> None:
        with self._descriptors:
            # First, so that no signal falls between the last look and the old handler.
            self._handlers.close()
            received = self.received
        if received is not None:
            signal.raise_signal(received)


def _do_nothing(number: int, frame: object) -> None:
    del number, frame
