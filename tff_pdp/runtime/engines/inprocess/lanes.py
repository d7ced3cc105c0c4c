"""Threads that compute clients side by side.

One client's operations seldom keep more than a core busy: they wait for each other. Two clients do. Stacks of clients
go without: their operations are large, and splitting a stack has been measured to cost time.
"""

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

_Result = TypeVar("_Result")
# Each lane has sums of its own. Their number decides how sums round, so it does not depend on the machine.
NUM_LANES = 8


class Lanes:
    """Runs functions on one device: as many at a time as there are cores, or one on an accelerator."""

    def __init__(self, device: str):
        """Starts no thread before the first use."""
        self._device = device
        self._num_threads = min(len(os.sched_getaffinity(0)), NUM_LANES) if device.startswith("/CPU") else 1
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def run(self, functions: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Returns the functions' results in their order; raises what the first of them to fail raises."""
        if len(functions) == 1 or self._num_threads == 1:
            return [function() for function in functions]
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self._num_threads, "tff-pdp-lane")
        futures = [self._threads.submit(self._run_on_device, function) for function in functions]
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.shutdown()
        self._threads = None

    def _run_on_device(self, function: Callable[[], _Result]) -> _Result:
        # TensorFlow keeps the device scope per thread.
        with tf.device(self._device):
            return function()
