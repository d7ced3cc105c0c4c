"""Divides a step over all clients: which of them one call computes, which lane makes the call, and with what results.

Lanes are threads that compute clients side by side. One client's operations seldom keep more than a core busy, as they
wait for each other; two clients' do. Stacks of clients have large operations and one lane: to split a stack has been
measured to cost time.
"""

import concurrent.futures
import dataclasses
import itertools
import os
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
# Each lane has sums of its own. Their number decides how sums round, so it does not depend on the machine.
NUM_LANES = 8


class Lanes:
    """Runs functions on one device: as many at a time as there are cores, or one on an accelerator."""

    def __init__(self, device: str):
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


# How clients are computed: one by one, or as stacks.
Mode = Literal["loop", "vectorized"]


def arrange(own: Mapping[str, ClientValues], mode: Mode, clients_per_call: int) -> list[list[np.ndarray]]:
    """Decides which clients are computed together, and arranges all values like this.

    Args:
      own: clients' values by name, which no one else arranges meanwhile.
      mode: how clients are computed.
      clients_per_call: the most clients computed at a time.

    Returns:
      For each lane the clients of its calls in turn, int64 `[clients]` each; empty where there are no clients.

    Raises:
      CannotStack: the mode stacks clients, and a value holds a data set.
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
    # Which lane a chunk is in is fixed, and so is the order of all sums: a repeated round has the same bits.
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
    """A client step with the values it takes.

    Attributes:
      step: traced for the mode.
      mode: how clients are computed.
      types: of values by name.
      shared: leaves of what all clients share, as the step takes them.
      clients: clients' values by name, arranged for the mode.
    """

    step: Step
    mode: Mode
    types: Mapping[str, Any]
    shared: Leaves
    clients: Mapping[str, ClientValues]

    def run(self, chunks: Sequence[np.ndarray], sums: Leaves) -> tuple[dict[str, list[ClientGroup]], Leaves]:
        """Computes chunks of clients in turn, and adds them to sums.

        Returns:
          The clients' new values by name, and the sums.

        Raises:
          CannotStack: the mode stacks clients, and their results have different shapes.
          tf.errors.OpError: the computation itself fails.
        """
        num_leaves = {name: len(structures.leaf_types(self.types[name])) for name in self.step.outputs}
        groups: dict[str, list[ClientGroup]] = {name: [] for name in self.step.outputs}
        for chunk in chunks:
            own = [leaf for name in self.step.own for leaf in self._leaves(name, chunk)]
            results = iter(self._call([tf.constant(len(chunk)), *self.shared, *own, *sums]))
            for name, count in num_leaves.items():
                leaves = tuple(itertools.islice(results, count))
                groups[name].append(ClientGroup(chunk, leaves, self.mode == "vectorized"))
            sums = list(results)
        return groups, sums

    def _leaves(self, name: str, chunk: np.ndarray) -> Sequence[tf.Tensor]:
        values = self.clients[name]
        if self.mode == "loop":
            return values.leaves_of(int(chunk[0]))
        for group in values.groups:
            if np.array_equal(group.indices, chunk):
                return group.leaves
        raise EngineError("clients' values are not arranged as the call needs them")

    def _call(self, inputs: Leaves) -> Leaves:
        try:
            return self.step.function(inputs)
        except tf.errors.InvalidArgumentError as error:
            # `tf.vectorized_map` stacks in the end whatever it computes client by client.
            if self.mode == "vectorized" and "/pfor/TensorArrayV2Stack" in str(error):
                raise CannotStack("its results have different shapes at different clients") from error
            raise
