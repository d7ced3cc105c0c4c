"""Divides a step over all clients into calls on lanes, and collects the results.

Lanes are threads that compute clients side by side. One client's operations wait for each other and seldom keep more
than one core busy, so several clients run at once. Stacks of clients have large operations and one lane: measurements
show that splitting a stack costs time.
"""

import concurrent.futures
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import tensorflow as tf

from tff_pdp.engines import structures
from tff_pdp.engines.client_values import ClientGroup, ClientValues, same_shapes
from tff_pdp.engines.inprocess.graphs import Leaves
from tff_pdp.engines.inprocess.stacked import CannotStack
from tff_pdp.engines.inprocess.steps import Step
from tff_pdp.errors import EngineError

_Result = TypeVar("_Result")
# Lines of TensorFlow's errors that only say where an operation was made.
_NO_REASON = re.compile(r"\s|Graph execution error|Detected at node|<stack traces")
# Each lane has its own sums. The number of lanes decides how sums round, so the number is the same on all machines.
NUM_LANES = 8


class Lanes:
    """Runs functions on one device: on a GPU one at a time, on a CPU as many at once as cores, at most `NUM_LANES`."""

    def __init__(self, device: str):
        self._device = device
        self._num_threads = min(len(os.sched_getaffinity(0)), NUM_LANES) if device.startswith("/CPU") else 1
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def run(self, functions: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Returns the results in the order of the functions; raises the error of the first function that failed."""
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


# How clients are computed: one by one, as stacks, or as stacks that XLA compiles as far as it may.
Mode = Literal["loop", "vectorized", "compiled"]


class CannotCompile(Exception):
    """Raised where a compiled stack fails; the message has the line of TensorFlow's error that states the reason."""


def arrange(own: Mapping[str, ClientValues], mode: Mode, clients_per_call: int) -> list[list[np.ndarray]]:
    """Decides which clients are computed together, and arranges all values in these groups.

    Args:
      own: clients' values by name, which no other thread may arrange meanwhile.
      mode: way in which clients are computed.
      clients_per_call: largest number of clients that are computed at a time.

    Returns:
      One list of calls for each lane, or an empty list without clients. A call is an array of client indices, int64
      `[clients]`.

    Raises:
      CannotStack: the mode stacks clients, and a value contains a data set.
    """
    if not own:
        return []
    if mode == "loop":
        for values in own.values():
            values.separate()
        chunks = [np.array([index]) for index in range(len(next(iter(own.values()))))]
        most_lanes = min(NUM_LANES, clients_per_call)
    else:
        chunks, most_lanes = _stack_by_shapes(own, clients_per_call), 1
    # Each chunk has a fixed lane, so the order of all sums is fixed: a repeated round has the same bits.
    num_lanes = min(most_lanes, len(chunks))
    return [chunks[lane::num_lanes] for lane in range(num_lanes)]


def _stack_by_shapes(own: Mapping[str, ClientValues], clients_per_call: int) -> list[np.ndarray]:
    """Stacks clients of equal shapes; returns the indices of each stack."""
    if any(spec.dtype == tf.variant for values in own.values() for spec in structures.leaf_specs(values.member_type)):
        raise CannotStack("data sets cannot be stacked")
    chunks = [
        np.array(group[begin : begin + clients_per_call])
        for group in same_shapes(own.values())
        for begin in range(0, len(group), clients_per_call)
    ]
    for values in own.values():
        values.arrange(chunks)
    return chunks


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
