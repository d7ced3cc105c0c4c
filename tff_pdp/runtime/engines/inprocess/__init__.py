"""TFF computations interpreted in this process, on the device asked for."""

import contextlib
from collections.abc import Iterator
from typing import Self

from tff_pdp import _tff
from tff_pdp.engines.base import resolve_device
from tff_pdp.engines.inprocess.clients import Mode
from tff_pdp.engines.inprocess.engine import InProcessContext
from tff_pdp.errors import EngineError
from tff_pdp.experiment.config import CLIENT_PARALLELISMS, ClientParallelism

DEFAULT_CLIENTS_PER_CALL = 256


def build_inprocess_engine(
    *,
    device: str = "auto",
    client_parallelism: ClientParallelism = "auto",
    clients_per_call: int = DEFAULT_CLIENTS_PER_CALL,
    choices: dict[str, Mode] | None = None,
) -> "InProcessEngine":
    """Builds an engine that runs computations in this process.

    Args:
      device: `cpu`, `gpu`, `gpu:N` or `auto`.
      client_parallelism: `loop` calls once for each client, on several cores; `vectorized` once for clients of equal
        shapes, and falls back to the loop where a computation cannot be stacked; `auto` times both at the first call of
        each computation and keeps the faster.
      clients_per_call: the most clients computed at a time; memory grows with it.
      choices: what `auto` chose before, by computation; a run that is resumed goes on with it. Added to.

    Returns:
      The engine, ready to use.

    Raises:
      EngineError: the device is absent, or an option is out of range.
    """
    if client_parallelism not in CLIENT_PARALLELISMS:
        raise EngineError(f"client_parallelism: {client_parallelism!r} is not known; write auto, loop or vectorized")
    if clients_per_call < 1:
        raise EngineError(f"clients_per_call must be at least 1, not {clients_per_call}")
    context = InProcessContext(
        resolve_device(device), client_parallelism, clients_per_call, {} if choices is None else choices
    )
    return InProcessEngine(context)


class InProcessEngine:
    """Executes computations in this process.

    Values at the server come back as tensors, and values at clients as `ClientValues`; both stay on the device, and
    going back into the next round they are not copied.
    """

    name = "inprocess"

    def __init__(self, context: InProcessContext):
        """Wraps a context; see `build_inprocess_engine`."""
        self._context: InProcessContext | None = context

    @property
    def device(self) -> str:
        """Where it computes: `cpu` or `gpu:N`."""
        return self._running().device.removeprefix("/").lower().replace("cpu:0", "cpu")

    @property
    def num_traced(self) -> int:
        """How many TensorFlow functions have been traced: constant once every computation has run."""
        return self._running().num_traced

    @property
    def choices(self) -> dict[str, Mode]:
        """How the clients of each computation are computed, where `auto` has chosen."""
        return self._running().choices

    @contextlib.contextmanager
    def install(self) -> Iterator[Self]:
        """Sends the TFF computations called in this thread inside the `with` block to this engine."""
        with _tff.get_context_stack().install(self._running()):
            yield self

    def close(self) -> None:
        """Lets go of all compiled computations; calling it again does nothing."""
        if self._context is not None:
            self._context.close()
        self._context = None

    def _running(self) -> InProcessContext:
        if self._context is None:
            raise EngineError("This engine has been closed.")
        return self._context
