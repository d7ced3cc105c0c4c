"""Declares the interface of every engine, and finds devices by name; a missing device is an error."""

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import tensorflow as tf

from tff_pdp.errors import EngineError


class WithoutWorkers:
    """The part of an engine's interface that is about workers, for an engine that has none on other machines."""

    def expect(self, facts: Callable[[], Any], check: Callable[[Any], str]) -> None:
        """Does nothing: there are no workers to check."""
        del facts, check

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
        """Device that the engine computes on: `cpu` or `gpu:N`."""
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


def resolve_device(name: str) -> str:
    """Finds the device that a user asks for, and sets TensorFlow's options for GPUs.

    Two options differ from TensorFlow's defaults: memory is allocated as needed, not all at once, and float32 numbers
    are multiplied as float32, not as TF32, which has 13 bits fewer. With TF32 a norm could be a thousandth too small,
    and the clipped gradient a thousandth too long.

    Args:
      name: `cpu`; `gpu`, the first GPU; `gpu:N`; or `auto`, the first GPU if there is one, else the CPU.

    Returns:
      TensorFlow's name for the device, such as `/GPU:0`.

    Raises:
      EngineError: the name is unknown, or there is no such GPU.
    """
    match = re.fullmatch(r"(cpu|gpu|auto)|gpu:(\d+)", name)
    if match is None:
        raise EngineError(f"device: {name!r} is not known; write cpu, gpu, gpu:N or auto")
    num_gpus = len(gpus())
    for device in tf.config.list_physical_devices("GPU"):
        # A process that has used its GPUs can no longer change this setting.
        with contextlib.suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(device, True)
    if name == "cpu" or (name == "auto" and not num_gpus):
        return "/CPU:0"
    number = int(match.group(2) or 0)
    if number >= num_gpus:
        found = f"TensorFlow sees {num_gpus} GPU{'s' if num_gpus != 1 else ''} here"
        raise EngineError(f"device: {name!r} is absent: {found}. Use 'cpu', or see `tff-pdp doctor`")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return f"/GPU:{number}"


def gpus() -> list[str]:
    """Returns descriptions of the GPUs that TensorFlow can use, in the order of their numbers."""
    devices = tf.config.list_physical_devices("GPU")
    return [tf.config.experimental.get_device_details(device).get("device_name", device.name) for device in devices]
