"""One version in memory: runs its requests off the event loop, and is freed when the last of them has ended."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import numpy as np

from serving.saved_model.servable import Servable, filtered
from serving.saved_model.signatures import Signature, Tensors, check_classes, check_values
from serving.server.batcher import Batcher, OnBatch
from serving.server.options import BatchingOptions

Result = TypeVar("Result")


class LoadedVersion:
    """One version of one model.

    `run`, `classify` and `regress` belong to one event loop, and so do the batchers they use. The count of users is
    behind a lock, since a version is retired by the thread that loaded its successor.

    Attributes:
      name: the model's name.
      version: the version's number.
      servable: the loaded export.
    """

    def __init__(
        self,
        name: str,
        version: int,
        servable: Servable,
        *,
        executor: Executor,
        batching: BatchingOptions | None,
        on_batch: OnBatch = lambda sizes, total: None,
    ):
        """Takes over a loaded export.

        Args:
          name: the model's name.
          version: the version's number.
          servable: the loaded export; closed when the version is retired and unused.
          executor: the threads that run requests.
          batching: how requests are merged; None to run each on its own.
          on_batch: told of every batch, in a thread that runs requests.
        """
        self.name = name
        self.version = version
        self.servable = servable
        self._executor = executor
        self._batching = batching
        self._on_batch = on_batch
        self._batchers: dict[str, Batcher] = {}
        self._lock = threading.Lock()
        self._num_users = 0
        self._when_unused: Callable[[], None] | None = None

    async def run(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], output_filter: Sequence[str] = ()
    ) -> Tensors:
        """Answers a predict request.

        Args:
          signature_name: empty for `serving_default`.
          inputs: one array for each input of the signature, by its key, of the declared dtype and shape.
          output_filter: keys of the outputs to return; all of them if empty.

        Returns:
          The outputs by their keys.

        Raises:
          RequestError: with the code and message that TensorFlow Serving would send.
        """
        signature = self.servable.predict_signature(signature_name)
        signature.check_predict(inputs, output_filter)
        return filtered(await self._run(signature, inputs), output_filter)

    async def classify(self, signature_name: str, examples: np.ndarray) -> Tensors:
        """Answers a classify request; see `Servable.classify`."""
        signature = self.servable.examples_signature(signature_name)
        outputs = await self._run(signature, signature.classify_inputs(examples))
        return check_classes(outputs, len(examples))

    async def regress(self, signature_name: str, examples: np.ndarray) -> Tensors:
        """Answers a regress request; see `Servable.regress`."""
        signature = self.servable.examples_signature(signature_name)
        outputs = await self._run(signature, signature.regress_inputs(examples))
        return check_values(outputs, len(examples))

    async def _run(self, signature: Signature, inputs: Mapping[str, np.ndarray]) -> Tensors:
        if self._batching is None or not signature.is_batchable:
            return await asyncio.wrap_future(self._submit(self.servable.run, signature.name, inputs))
        return await self._batcher(signature.name, self._batching).run(inputs)

    def _batcher(self, signature_name: str, options: BatchingOptions) -> Batcher:
        if signature_name not in self._batchers:
            servable = self.servable
            self._batchers[signature_name] = Batcher(
                lambda inputs: servable.run(signature_name, inputs), options, self._submit, self._on_batch
            )
        return self._batchers[signature_name]

    def _submit(self, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Runs in a thread, as a user of its own: a caller that goes away does not end what it has begun."""
        self.add_user()
        try:
            future = self._executor.submit(function, *arguments)
        except BaseException:
            self.remove_user()
            raise
        future.add_done_callback(lambda _: self.remove_user())
        return future

    def add_user(self) -> None:
        """Counts a request, or what runs for it, in. Only for a version that is not retired."""
        with self._lock:
            self._num_users += 1

    def remove_user(self) -> None:
        """Counts a request out; the last one of a retired version ends it."""
        with self._lock:
            self._num_users -= 1
            ended = self._num_users == 0 and self._when_unused
        if ended:
            ended()

    def retire(self, when_unused: Callable[[], None]) -> None:
        """Says that no further request comes.

        Args:
          when_unused: called once no request uses the version: here and now, or by the last of them.
        """
        with self._lock:
            self._when_unused = when_unused
            is_unused = self._num_users == 0
        if is_unused:
            when_unused()
