"""Merging requests: those that arrive while the model is busy leave together, so no request waits for a clock."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

import grpc
import numpy as np

from serving.errors import RequestError
from serving.saved_model.signatures import Tensors
from serving.server.batching import BatchingOptions

Inputs = Mapping[str, np.ndarray]
Run = Callable[[Inputs], Tensors]
# What requests must share to be merged: dtype and sizes of each input, the first size left out.
_Kind = tuple


@dataclasses.dataclass(eq=False)
class _Waiting:
    """One request in the queue. `num_examples` is None where it must run on its own."""

    inputs: Inputs
    kind: _Kind
    num_examples: int | None
    answer: asyncio.Future[Tensors]


class Batcher:
    """Runs the requests of one signature in batches. Belongs to one event loop; only batches run in other threads.

    A batch leaves as soon as one of `num_batch_threads` is free, with whatever fits of what waits; an idle model
    therefore answers a single request at once. Requests of different dtypes or inner sizes are never merged. Merging
    never changes what a request is answered: if a batch fails, its requests are run one by one, and a request whose
    inputs have different first sizes runs on its own.
    """

    def __init__(self, run: Run, options: BatchingOptions, executor: Executor):
        """Builds an empty queue.

        Args:
          run: runs inputs and returns outputs, in a thread of `executor`.
          options: how requests are merged.
          executor: threads; should have `num_batch_threads` to spare.
        """
        self._run_inputs = run
        self._options = options
        self._executor = executor
        # By kind, so that a batch is taken from the front of one queue; a queue that is left over goes to the end.
        self._queues: dict[_Kind, collections.deque[_Waiting]] = {}
        self._num_waiting = 0
        self._num_running = 0

    async def run(self, inputs: Inputs) -> Tensors:
        """Runs one request, merged with others or not.

        Raises:
          RequestError: UNAVAILABLE if the queue is full; else what running this request alone would raise.
        """
        waiting = _waiting(inputs)
        self._check_capacity(waiting)
        self._queues.setdefault(waiting.kind, collections.deque()).append(waiting)
        self._num_waiting += self._weight(waiting)
        self._start_batches()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._leave(waiting)
            raise

    def _check_capacity(self, waiting: _Waiting) -> None:
        limit = self._options.max_enqueued_batches
        if self._num_waiting + self._weight(waiting) > limit * self._options.max_batch_size:
            raise RequestError(
                grpc.StatusCode.UNAVAILABLE,
                "The batch scheduling queue to which this task was submitted is full; currently "
                f"{-(-self._num_waiting // self._options.max_batch_size)} batches enqueued and max_enqueued_batches "
                f"is {limit}",
            )

    def _weight(self, waiting: _Waiting) -> int:
        """Examples that a request counts for in the queue: one that runs on its own is a batch."""
        largest = self._options.max_batch_size
        return min(waiting.num_examples or largest, largest)

    def _leave(self, waiting: _Waiting) -> None:
        """Takes a request whose caller is gone out of the queue, if it has not left it yet."""
        queue = self._queues.get(waiting.kind)
        if queue is None or waiting not in queue:
            return
        queue.remove(waiting)
        self._num_waiting -= self._weight(waiting)
        if not queue:
            del self._queues[waiting.kind]

    def _start_batches(self) -> None:
        while self._queues and self._num_running < self._options.num_batch_threads:
            batch = self._take_batch()
            self._num_running += 1
            loop = asyncio.get_running_loop()
            done = loop.run_in_executor(self._executor, self._run_batch, [waiting.inputs for waiting in batch])
            done.add_done_callback(lambda done, batch=batch: self._finish(batch, done))

    def _take_batch(self) -> list[_Waiting]:
        kind = next(iter(self._queues))
        queue = self._queues.pop(kind)
        batch = [queue.popleft()]
        weight = self._weight(batch[0])
        while queue and weight + self._weight(queue[0]) <= self._options.max_batch_size:
            batch.append(queue.popleft())
            weight += self._weight(batch[-1])
        if queue:
            self._queues[kind] = queue
        self._num_waiting -= weight
        return batch

    def _finish(self, batch: Sequence[_Waiting], done: asyncio.Future) -> None:
        self._num_running -= 1
        for waiting, answer in zip(batch, done.result(), strict=True):
            # A caller that went away while its batch ran.
            if waiting.answer.done():
                continue
            if isinstance(answer, Exception):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)
        self._start_batches()

    def _run_batch(self, requests: Sequence[Inputs]) -> list[Tensors | Exception]:
        """Runs in a thread: returns for each request its answer or its own error."""
        with contextlib.suppress(Exception):
            # Whatever fails may be the fault of one of them; each gets its own answer below.
            if len(requests) > 1 or self._needs_padding(requests[0]):
                return self._run_merged(requests)
        return [self._run_alone(inputs) for inputs in requests]

    def _needs_padding(self, inputs: Inputs) -> bool:
        num_examples = _num_examples(inputs)
        return num_examples is not None and self._options.padded_size(num_examples) > num_examples

    def _run_merged(self, requests: Sequence[Inputs]) -> list[Tensors | Exception]:
        sizes = [_num_examples(inputs) or 0 for inputs in requests]
        padding = self._options.padded_size(sum(sizes)) - sum(sizes)
        outputs = self._run_inputs({key: _merged(key, requests, padding) for key in requests[0]})
        for key, array in outputs.items():
            if array.ndim == 0 or len(array) != sum(sizes) + padding:
                raise ValueError(f"Output {key} has shape {array.shape}, so it cannot be divided among requests.")
        ends = list(itertools.accumulate(sizes))
        return [
            {key: array[end - size : end] for key, array in outputs.items()}
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _run_alone(self, inputs: Inputs) -> Tensors | Exception:
        try:
            return self._run_inputs(inputs)
        # Handed to the caller of this one request, who re-raises it.
        except Exception as error:
            return error


def _waiting(inputs: Inputs) -> _Waiting:
    num_examples = _num_examples(inputs)
    answer = asyncio.get_running_loop().create_future()
    if num_examples is None:
        # A kind of its own: nothing is merged with it.
        return _Waiting(inputs, (object(),), None, answer)
    kind = tuple((key, array.dtype, array.shape[1:]) for key, array in sorted(inputs.items()))
    return _Waiting(inputs, kind, num_examples, answer)


def _num_examples(inputs: Inputs) -> int | None:
    """Returns the common first size; None where inputs have none in common, or there are no examples."""
    sizes = {array.shape[0] if array.ndim else None for array in inputs.values()}
    return (sizes.pop() or None) if len(sizes) == 1 else None


def _merged(key: str, requests: Sequence[Inputs], padding: int) -> np.ndarray:
    arrays = [inputs[key] for inputs in requests]
    if padding:
        # A row that is there already is one that the model accepts.
        arrays.append(np.repeat(arrays[-1][:1], padding, axis=0))
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
