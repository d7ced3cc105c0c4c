"""The process of one worker. TensorFlow is imported only after the head's settings of libraries are in place."""

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from tff_pdp.engines.base import LIBRARY_SETTINGS
from tff_pdp.engines.ray_workers.temporary_folders import OF_WORKERS, TemporaryFolder


class Worker:
    """Computes parts of calls, in a process of its own. One request is answered at a time."""

    def __init__(
        self,
        build_host: bytes,
        device: str,
        cores: int,
        environment: Mapping[str, str],
        has_deterministic_operations: bool,
    ):
        """Starts an engine.

        Args:
          build_host: pickled function that builds the object for recipes and addresses; see `calls.Host`.
          device: device that the worker computes on.
          cores: number of cores to use on a CPU.
          environment: the head's settings of libraries; others with the same prefixes are removed, such as Ray's
            number of threads.
          has_deterministic_operations: whether TensorFlow uses only kernels whose sums are reproducible to the bit.
        """
        for name in [name for name in os.environ if name.startswith(LIBRARY_SETTINGS)]:
            del os.environ[name]
        os.environ.update(environment)
        # Workers end by a signal, and would leave what they have written in the folder of all processes.
        self._folder = TemporaryFolder(OF_WORKERS)
        tempfile.tempdir = str(self._folder.path)
        from tff_pdp.engines.devices import use_deterministic_operations
        from tff_pdp.engines.ray_workers.part_runner import PartRunner

        # Before the engine takes a GPU.
        if has_deterministic_operations:
            use_deterministic_operations()
        self._runner = PartRunner(pickle.loads(build_host)(), device, cores)

    def describe(self, facts: Callable[[], Any] | None) -> tuple[int, str, Any]:
        """Returns the process's number, the node's name, and facts of the worker's machine."""
        return os.getpid(), os.uname().nodename, facts and facts()

    def answer(self, *arguments: Any) -> Any:
        """Answers a request about a call; see `PartRunner.answer`."""
        return self._runner.answer(*arguments)

    def compare(self, *arguments: Any) -> Any:
        """Times both ways of computing clients; see `PartRunner.compare`."""
        return self._runner.compare(*arguments)

    def end(self) -> None:
        """Removes the worker's temporary files; the last request."""
        self._folder.remove()


def settings_here() -> dict[str, str]:
    """Returns this process's settings of libraries."""
    return {name: value for name, value in os.environ.items() if name.startswith(LIBRARY_SETTINGS)}
