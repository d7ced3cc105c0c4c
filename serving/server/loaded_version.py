"""Runs the requests of one loaded version outside of the event loop, and frees the version after its last request.

Requests that arrive while the model is busy are merged into batches; no request waits until a batch is full.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import grpc
import numpy as np

from serving.errors import RequestError
from serving.saved_model.servable import Servable, filtered
from serving.saved_model.signatures import CHECKED_OUTPUTS, Signature, Tensors
from serving.server.options import BatchingOptions

Inputs = Mapping[str, np.ndarray]
_LOGGER = logging.getLogger(__name__)
# The form of ids that `serving.client_ids.ClientIdHash` makes.
_HASHED_ID = re.compile(rb"[0-9a-f]{32}")
# Requests with the same dtype and inner sizes of each input can be merged.
_Kind = tuple
# Takes the number of examples of each request of a batch, and the number that ran, padding included.
OnBatch = Callable[[Sequence[int], int], None]

# Under load, gRPC's library takes several turns of the loop to read a request. With 32 clients at a time, batches of
# requests with one example each grew from 5 to 13 requests by this wait.
_QUIET_TURNS = 8


@dataclasses.dataclass(eq=False, slots=True)
class _Waiting:
    """One request in the queue.

    Attributes:
      inputs: tensors of the request, by key.
      num_examples: common first size of the inputs; None if there is none, so that the request runs on its own.
      weight: number of examples that the request counts for; that of a full batch if the request runs on its own.
      answer: future that the caller waits for.
    """

    inputs: Inputs
    num_examples: int | None
    weight: int
    answer: asyncio.Future[Tensors]


@dataclasses.dataclass(eq=False)
class Batcher:
    """Runs the requests of one signature in batches. Use it on one event loop; only the batches run in other threads.

    At most `num_batch_threads` batches run at the same time. When one batch ends, the next batch starts at once. If a
    thread is free already, waiting requests start as a batch when no further request has come for a few turns of the
    loop (some 50 microseconds), or when `max_batch_size` examples are waiting.

    Only requests whose inputs have equal dtypes and equal sizes after the first dimension are merged. Merging never
    changes an answer: if a batch fails, its requests are run one by one, and a request whose inputs have different
    first sizes is never merged.

    `submit` runs a function in another thread, like `Executor.submit`, and must have `num_batch_threads` threads free
    for batches. `run_inputs` and `on_batch` are called in these threads.
    """

    run_inputs: Callable[[Inputs], Tensors]
    options: BatchingOptions
    submit: Callable[..., object]
    on_batch: OnBatch

    def __post_init__(self):
        # By kind, so that a batch is taken from the front of one queue; a queue with requests left goes to the end.
        self._queues: dict[_Kind, collections.deque[_Waiting]] = {}
        self._num_waiting = 0
        self._num_running = 0
        # Turns of the loop since the last request came; None while nobody counts them.
        self._quiet_turns: int | None = None

    async def run(self, inputs: Inputs) -> Tensors:
        """Runs one request, alone or merged with others.

        Raises:
          RequestError: UNAVAILABLE if the queue is full; otherwise the error that the request alone would cause.
        """
        loop = asyncio.get_running_loop()
        num_examples, largest = _num_examples(inputs), self.options.max_batch_size
        weight = min(num_examples or largest, largest)
        self._check_capacity(weight)
        waiting = _Waiting(inputs, num_examples, weight, loop.create_future())
        kind = _kind(inputs) if num_examples else (waiting,)
        self._queues.setdefault(kind, collections.deque()).append(waiting)
        self._num_waiting += weight
        if self._quiet_turns is None:
            loop.call_soon(self._collect, loop)
        self._quiet_turns = 0
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._leave(kind, waiting)
            raise

    def _check_capacity(self, weight: int) -> None:
        limit = self.options.max_enqueued_batches
        if self._num_waiting + weight > limit * self.options.max_batch_size:
            raise RequestError(
                grpc.StatusCode.UNAVAILABLE,
                "The batch scheduling queue to which this task was submitted is full; currently "
                f"{-(-self._num_waiting // self.options.max_batch_size)} batches enqueued and max_enqueued_batches "
                f"is {limit}",
            )

    def _leave(self, kind: _Kind, waiting: _Waiting) -> None:
        """Removes a request whose caller is gone from the queue, if the request is still there."""
        queue = self._queues.get(kind)
        if queue is None or waiting not in queue:
            return
        queue.remove(waiting)
        self._num_waiting -= waiting.weight
        if not queue:
            del self._queues[kind]

    def _collect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts batches once all arrived requests are read: a batch of half of them would cost another run."""
        self._quiet_turns = (self._quiet_turns or 0) + 1
        if self._quiet_turns < _QUIET_TURNS and self._num_waiting < self.options.max_batch_size:
            loop.call_soon(self._collect, loop)
            return
        self._quiet_turns = None
        self._start_batches(loop)

    def _start_batches(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._queues and self._num_running < self.options.num_batch_threads:
            self.submit(self._run_batch, self._take_batch(), loop)
            self._num_running += 1

    def _take_batch(self) -> list[_Waiting]:
        kind = next(iter(self._queues))
        queue = self._queues.pop(kind)
        batch = [queue.popleft()]
        weight = batch[0].weight
        while queue and weight + queue[0].weight <= self.options.max_batch_size:
            batch.append(queue.popleft())
            weight += batch[-1].weight
        if queue:
            self._queues[kind] = queue
        self._num_waiting -= weight
        return batch

    def _finish(
        self, batch: Sequence[_Waiting], answers: Sequence[Tensors | Exception], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._num_running -= 1
        for waiting, answer in zip(batch, answers, strict=True):
            # A caller that went away while its batch ran.
            if waiting.answer.done():
                continue
            if isinstance(answer, Exception):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)
        self._start_batches(loop)

    def _run_batch(self, batch: Sequence[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: finds for each request its answer or its own error, and hands them to the loop."""
        answers = self._answers(batch)
        # Nobody waits on a loop that has ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._finish, batch, answers, loop)

    def _answers(self, batch: Sequence[_Waiting]) -> Sequence[Tensors | Exception]:
        sizes = [waiting.num_examples or 0 for waiting in batch]
        padding = self.options.padded_size(sum(sizes)) - sum(sizes)
        # A request without a number of examples came alone, and cannot be padded.
        if all(sizes) and (len(batch) > 1 or padding):
            # A failure may be the fault of one request; each gets its own answer below.
            with contextlib.suppress(Exception):
                return self._run_merged(batch, sizes, padding)
        return [self._run_alone(waiting) for waiting in batch]

    def _run_merged(self, batch: Sequence[_Waiting], sizes: Sequence[int], padding: int) -> list[Tensors]:
        outputs = self.run_inputs({key: _merged(key, batch, padding) for key in batch[0].inputs})
        for key, array in outputs.items():
            if array.ndim == 0 or len(array) != sum(sizes) + padding:
                raise ValueError(f"Output {key} has shape {array.shape}, so it cannot be divided among requests.")
        self.on_batch(sizes, sum(sizes) + padding)
        return [
            {key: array[end - size : end] for key, array in outputs.items()}
            for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)
        ]

    def _run_alone(self, waiting: _Waiting) -> Tensors | Exception:
        try:
            outputs = self.run_inputs(waiting.inputs)
        # Handed to the caller of this one request, who re-raises it.
        except Exception as error:
            return error
        if waiting.num_examples:
            self.on_batch([waiting.num_examples], waiting.num_examples)
        return outputs


def _kind(inputs: Inputs) -> _Kind:
    return tuple([(key, inputs[key].dtype, inputs[key].shape[1:]) for key in sorted(inputs)])


def _num_examples(inputs: Inputs) -> int | None:
    """Returns the common first size; None where there is none, or there are no examples."""
    sizes = {array.shape[:1] for array in inputs.values()}
    common = sizes.pop() if len(sizes) == 1 else ()
    return common[0] or None if common else None


def _merged(key: str, batch: Sequence[_Waiting], padding: int) -> np.ndarray:
    arrays = [waiting.inputs[key] for waiting in batch]
    if padding:
        # The model accepts copies of a row that is there already.
        arrays.append(np.repeat(arrays[-1][:1], padding, axis=0))
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


Result = TypeVar("Result")


@dataclasses.dataclass(eq=False)
class LoadedVersion:
    """One loaded version of a model, with a count of its users: the requests and runs that still need it.

    Run all requests on one event loop. Users are counted under a lock, because another thread retires the version when
    its successor has been loaded.

    Attributes:
      name: name of the model.
      version: number of the version.
      servable: loaded export; the callback that is passed to `retire` closes the servable.
      executor: executor whose threads run requests and call `on_batch`.
      batching: options for merging requests; None to run each request on its own.
      on_batch: function to record a batch; see `OnBatch`.
      has_hashed_ids: whether the version knows clients by hashes of their ids. The first request with another kind of
        id is then warned of in the log, because the global model answers it.
    """

    name: str
    version: int
    servable: Servable
    _: dataclasses.KW_ONLY
    executor: Executor
    batching: BatchingOptions | None
    on_batch: OnBatch
    has_hashed_ids: bool = False

    def __post_init__(self):
        self._batchers: dict[str, Batcher] = {}
        self._lock = threading.Lock()
        self._num_users = 0
        self._when_unused: Callable[[], None] | None = None

    async def run(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], output_filter: Sequence[str] = ()
    ) -> Tensors:
        """Answers a predict request as `Servable.predict` does."""
        signature = self.servable.signature(signature_name)
        signature.check_predict(inputs, output_filter)
        if self.has_hashed_ids and "client_id" in inputs:
            self._warn_of_plain_ids(inputs["client_id"])
        return filtered(await self._run(signature, inputs), output_filter)

    async def on_examples(self, method: str, signature_name: str, examples: np.ndarray) -> Tensors:
        """Answers a request to classify or regress as `Servable.on_examples` does."""
        signature = self.servable.signature(signature_name, of_examples=True)
        outputs = await self._run(signature, signature.examples_input(method, examples))
        return CHECKED_OUTPUTS[method](outputs, len(examples))

    async def _run(self, signature: Signature, inputs: Mapping[str, np.ndarray]) -> Tensors:
        if self.batching is None or not signature.is_batchable:
            return await asyncio.wrap_future(self._submit(self.servable.run, signature.name, inputs))
        batcher = self._batchers.get(signature.name)
        if batcher is None:
            run = functools.partial(self.servable.run, signature.name)
            batcher = self._batchers[signature.name] = Batcher(run, self.batching, self._submit, self.on_batch)
        return await batcher.run(inputs)

    def _warn_of_plain_ids(self, ids: np.ndarray) -> None:
        """Warns once if a request's first id is not a hash; the id itself, which may name a person, is not logged."""
        first = next(iter(ids.ravel()), b"")
        known = first.encode() if isinstance(first, str) else bytes(first)
        if not known or _HASHED_ID.fullmatch(known):
            return
        self.has_hashed_ids = False
        _LOGGER.warning(
            "A request asked %s for a client by a plain id, but this export has hashes of ids: the global model "
            "answers (personalized: false). `tff-pdp client-id` computes a client's hash; export.client_ids: plain "
            "exports ids as they are. This is said once.",
            self.name,
        )

    def _submit(self, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Calls a function in a thread, counted as a user: the call outlives a caller that goes away."""
        self.add_user()
        try:
            future = self.executor.submit(function, *arguments)
        except BaseException:
            self.remove_user()
            raise
        future.add_done_callback(lambda _: self.remove_user())
        return future

    def add_user(self) -> None:
        """Adds one user, a request or a run for a request, to the count. The version must not be retired."""
        with self._lock:
            self._num_users += 1

    def remove_user(self) -> None:
        """Removes one user from the count; after the last user of a retired version, calls the callback of `retire`."""
        with self._lock:
            self._num_users -= 1
            ended = self._num_users == 0 and self._when_unused
        if ended:
            ended()

    def retire(self, when_unused: Callable[[], None]) -> None:
        """Retires the version, which must get no new request from now on; calls `when_unused` once no user is left."""
        with self._lock:
            self._when_unused = when_unused
            is_unused = self._num_users == 0
        if is_unused:
            when_unused()
