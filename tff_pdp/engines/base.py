"""Declares the interface of every engine, and finds its device: asked for by name, and never another one."""

import contextlib
import re
from contextlib import AbstractContextManager
from typing import Protocol, Self

import tensorflow as tf

from tff_pdp.errors import EngineError


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
        """The device it computes on: `cpu` or `gpu:N`."""
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


def resolve_device(name: str) -> str:
    """Finds the device a user asks for.

    GPUs are told to take memory as they need it, where TensorFlow's default is to take all of it at once, and to
    multiply float32 as float32, where its default is to drop 13 bits of each factor (TF32): a norm that is off by a
    thousandth would clip by as much too little.

    Args:
      name: `cpu`; `gpu`, the first one; `gpu:N`; or `auto`, the first GPU where there is one, else the CPU.

    Returns:
      TensorFlow's name for the device, such as `/GPU:0`.

    Raises:
      EngineError: the name is none of these, or there is no such GPU.
    """
    match = re.fullmatch(r"(cpu|gpu|auto)|gpu:(\d+)", name)
    if match is None:
        raise EngineError(f"device: {name!r} is not known; write cpu, gpu, gpu:N or auto")
    num_gpus = len(gpus())
    for device in tf.config.list_physical_devices("GPU"):
        # A process that has used its GPUs already has decided.
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
    """Returns descriptions of the GPUs TensorFlow can use, in the order of their numbers."""
    devices = tf.config.list_physical_devices("GPU")
    return [tf.config.experimental.get_device_details(device).get("device_name", device.name) for device in devices]
