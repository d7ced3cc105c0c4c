"""Computes a step on parts of the clients, in calls on lanes, and collects the results.

Lanes are threads that compute clients side by side. One client's operations wait for each other and seldom keep more
than one core busy, so several clients run at once, and so do stacks of clients whose work is large.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tff_pdp.engines import structures
from tff_pdp.engines.client_values import ClientGroup, ClientValues
from tff_pdp.engines.inprocess.graphs import Leaves
from tff_pdp.engines.inprocess.parts import NUM_PARTS, Chunk, Mode
from tff_pdp.engines.inprocess.stacked import CannotStack
from tff_pdp.engines.inprocess.steps import Step
from tff_pdp.errors import EngineError

_Result = TypeVar("_Result")
# Lines of TensorFlow's errors that only say where an operation was made.
_NO_REASON = re.compile(r"\s|Graph execution error|Detected at node|<stack traces")


class Lanes:
    """Runs functions side by side: on the CPU as many as cores, at most `NUM_PARTS`; on each GPU one at a time."""

    def __init__(self, devices: Sequence[str], cores: int | None = None):
        """Sets the devices, and the number of cores to use on the CPU; by default all that this process may use."""
        available = len(os.sched_getaffinity(0))
        self._cores = min(cores or available, available)
        self._pools: list[concurrent.futures.ThreadPoolExecutor] = []
        self.use(devices)

    def use(self, devices: Sequence[str]) -> None:
        """Moves further work to these devices."""
        self.close()
        self._devices = devices
        self._threads_per_device = min(self._cores, NUM_PARTS) if self.is_cpu else 1

    @property
    def is_cpu(self) -> bool:
        """Checks if the CPU computes clients."""
        return len(self._devices) == 1 and self._devices[0].startswith("/CPU")

    @property
    def has_several_devices(self) -> bool:
        """Checks if several devices compute clients side by side."""
        return len(self._devices) > 1

    def run(self, functions: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Returns the results in the order of the functions; raises the error of the first function that failed.

        Devices take turns, so the number of devices decides where a function runs, but not what the function computes.
        """
        if len(functions) == 1 or len(self._devices) * self._threads_per_device == 1:
            return [function() for function in functions]
        if not self._pools:
            name, size = "tff-pdp-lane", self._threads_per_device
            self._pools = [concurrent.futures.ThreadPoolExecutor(size, name) for _ in self._devices]
        turns = itertools.cycle(zip(self._pools, self._devices, strict=True))
        futures = [
            pool.submit(_run_on, device, function) for function, (pool, device) in zip(functions, turns, strict=False)
        ]
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    @contextlib.contextmanager
    def beside(self, function: Callable[[], object]) -> Iterator[None]:
        """Runs `function` beside the `with` block, on a thread of its own; with a single thread, after the block.

        The end of the block waits for the function and raises its error, unless the block itself has raised one.
        """
        if len(self._devices) > 1 or self._threads_per_device == 1:
            yield
            function()
            return
        with concurrent.futures.ThreadPoolExecutor(1, "tff-pdp-beside") as thread:
            future = thread.submit(_run_on, self._devices[0], function)
            yield
        future.result()

    def close(self) -> None:
        """Ends the threads."""
        for pool in self._pools:
            pool.shutdown()
        self._pools = []


def _run_on(device: str, function: Callable[[], _Result]) -> _Result:
    # TensorFlow keeps the device scope per thread.
    with tf.device(device):
        return function()


class CannotCompile(Exception):
    """Raised where a compiled stack fails; the message has the line of TensorFlow's error that states the reason."""


def arrange(own: Mapping[str, ClientValues], parts: Sequence[Sequence[Chunk]], mode: Mode) -> None:
    """Arranges all values in the groups that the calls of `parts` compute.

    Args:
      own: clients' values by name, which no other thread may arrange meanwhile.
      parts: all parts of the clients, as `parts.divide` returns them.
      mode: way in which clients are computed.

    Raises:
      CannotStack: the mode stacks clients, and a value contains a data set.
    """
    if mode != "loop" and any(
        spec.dtype == tf.variant for values in own.values() for spec in structures.leaf_specs(values.member_type)
    ):
        raise CannotStack("data sets cannot be stacked")
    for values in own.values():
        if mode == "loop":
            values.separate()
        else:
            values.arrange([chunk for part in parts for chunk in part])


@dataclasses.dataclass(frozen=True)
class ClientWork:
    """A client step with its inputs.

    Attributes:
      step: the client step, traced for the mode.
      mode: way in which clients are computed.
      types: types of values, by name.
      shared: leaves of the values that all clients share, in the order of the step's inputs.
      clients: clients' values by name, arranged for the mode.
    """

    step: Step
    mode: Mode
    types: Mapping[str, Any]
    shared: Leaves
    clients: Mapping[str, ClientValues]

    def run(self, chunks: Sequence[np.ndarray], sums: Leaves) -> tuple[dict[str, list[ClientGroup]], Leaves]:
        """Computes chunks of clients one after the other, and adds their values to the sums.

        Returns:
          The clients' new values by name, and the sums.

        Raises:
          CannotStack: the mode stacks clients, and their results have different shapes.
          CannotCompile: XLA compiles the step, and the step fails, for whatever reason.
          tf.errors.OpError: the computation itself fails.
        """
        num_leaves = {name: len(structures.leaf_types(self.types[name])) for name in self.step.outputs}
        groups: dict[str, list[ClientGroup]] = {name: [] for name in self.step.outputs}
        for chunk in chunks:
            own = [leaf for name in self.step.own for leaf in self._leaves(name, chunk)]
            results = iter(self._call([tf.constant(len(chunk)), *self.shared, *own, *sums]))
            for name, count in num_leaves.items():
                leaves = tuple(itertools.islice(results, count))
                groups[name].append(ClientGroup(chunk, leaves, self.mode != "loop"))
            sums = list(results)
        return groups, sums

    def _leaves(self, name: str, chunk: np.ndarray) -> Sequence[tf.Tensor]:
        values = self.clients[name]
        if self.mode == "loop":
            return values.leaves_of(int(chunk[0]))
        for group in values.groups:
            if np.array_equal(group.indices, chunk):
                return group.leaves
        raise EngineError("clients' values are not arranged in the groups that this call computes")

    def _call(self, inputs: Leaves) -> Leaves:
        try:
            return self.step.function(inputs)
        except tf.errors.OpError as error:
            if self.step.is_compiled:
                # XLA has many types of errors. If the data are at fault, the step without XLA fails as well.
                lines = [line for line in str(error).splitlines() if line and not _NO_REASON.match(line)]
                raise CannotCompile(lines[0] if lines else type(error).__name__) from error
            # `tf.vectorized_map` stacks all results in the end, also those that it computes client by client.
            if self.mode != "loop" and "/pfor/TensorArrayV2Stack" in str(error):
                raise CannotStack("the computation's results have different shapes at different clients") from error
            raise
