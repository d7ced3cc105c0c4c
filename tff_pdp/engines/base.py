"""Declares the interface of every engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

# Settings of the libraries that compute, by the beginnings of their names: the same sums are rounded in the same way
# only under the same settings.
LIBRARY_SETTINGS = ("TF_", "XLA_", "ONEDNN_", "DNNL_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NPY_", "GLIBC_")
LIBRARY_SETTINGS += ("CUBLAS_", "CUDNN_", "NVIDIA_TF32_")


class WithoutWorkers:
    """The part of an engine's interface that is about workers, for an engine that has none on other machines."""

    def expect(self, facts: Callable[[], Any], check: Callable[[Any], str]) -> None:
        """Does nothing: there are no workers to check."""
        del facts, check

    def facts(self, find: Callable[[], Any]) -> Any:
        """Returns facts of the machine that computes clients, as the function `find` finds them."""
        return find()

    def condition(self) -> str:
        """Returns an empty text: there are no workers."""
        return ""


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

    def expect(self, facts: Callable[[], Any], check: Callable[[Any], str]) -> None:
        """Sets a check that workers on other machines must pass, now and when they are replaced.

        Args:
          facts: function that each worker calls for facts of its machine.
          check: function of these facts that returns an error; empty if there is none.

        Raises:
          EngineError: a worker does not pass.
        """
        ...

    def facts(self, find: Callable[[], Any]) -> Any:
        """Returns facts of a machine that computes clients, as the function `find` finds them there."""
        ...

    def condition(self) -> str:
        """Describes the engine's workers in a few words, for progress bars; empty without workers."""
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
