"""What every engine offers, whichever way it executes TFF computations."""

from contextlib import AbstractContextManager
from typing import Protocol, Self


class Engine(Protocol):
    """A way to execute TFF computations; ready to use once built.

    The same computations give the same results on every engine, up to rounding.
    """

    @property
    def name(self) -> str:
        """The name under which `build_engine` knows this engine."""
        ...

    @property
    def device(self) -> str:
        """Where it computes: `cpu` or `gpu:N`."""
        ...

    def install(self) -> AbstractContextManager[Self]:
        """Sends the TFF computations called inside the `with` block to this engine.

        TFF keeps its contexts per thread: only the thread that enters the block is affected. A thread started inside
        it has no engine ("No default context installed", says TFF) until it calls `install` itself. Blocks may be
        nested and entered again.
        """
        ...

    def close(self) -> None:
        """Releases processes, threads and devices; calling it again does nothing, using the engine then is an error."""
        ...
