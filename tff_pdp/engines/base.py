"""Declares the interface of every engine."""

from contextlib import AbstractContextManager
from typing import Protocol, Self


class Engine(Protocol):
    """An object that executes TFF computations; it is ready to use once it is built.

    The same computations give the same results on every engine, up to rounding.
    """

    @property
    def name(self) -> str:
        """Name by which `build_engine` builds this engine."""
        ...

    @property
    def device(self) -> str:
        """Device that the engine computes on: `cpu`, `gpu:N`, `gpu` for several GPUs, or `auto` for the faster one.

        Runs are recorded with it. `auto` stands for a machine with a GPU; the choice is recorded separately.
        """
        ...

    def install(self) -> AbstractContextManager[Self]:
        """Sends the TFF computations called inside the `with` block to this engine.

        TFF keeps its contexts per thread: only the thread that enters the block is affected. A thread started inside
        the block has no engine until it calls `install` itself; TFF's error is "No default context installed". Blocks
        may be nested and entered again.
        """
        ...

    def close(self) -> None:
        """Releases processes, threads and devices. A second call does nothing; a closed engine raises on use."""
        ...
