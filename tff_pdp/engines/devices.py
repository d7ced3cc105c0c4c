"""Finds devices by name, and says whether a GPU computes the same sums to the same bits each time.

A missing device is an error: no other device takes its place.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.errors import EngineError

# TensorFlow's names of devices whose clients one engine computes side by side. Server steps run on the first device.
Place = tuple[str, ...]
CPU: Place = ("/CPU:0",)
_DRIVER = Path("/proc/driver/nvidia/version")
# True if operations were deterministic when an engine first took a GPU in this process; None before.
_state: dict[str, bool | None] = {"deterministic at first use": None}


def find_places(name: str) -> list[Place]:
    """Finds the places that a user allows, and sets TensorFlow's options for GPUs.

    Two options differ from TensorFlow's defaults: memory is allocated as needed, not all at once, and float32 numbers
    are multiplied as float32, not as TF32, which has 13 bits fewer. With TF32 a norm could be a thousandth too small,
    and the clipped gradient a thousandth too long.

    Args:
      name: `cpu`; `gpu`, all GPUs; `gpu:N`, one GPU; or `auto`, the CPU, and all GPUs if there are any.

    Returns:
      One place for each way to compute, the CPU first. Only `auto` with a GPU has two: the engine times both.

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
        return [CPU]
    if int(match.group(2) or 0) >= num_gpus:
        found = f"TensorFlow sees {num_gpus} GPU{'s' if num_gpus != 1 else ''} here"
        raise EngineError(f"device: {name!r} is absent: {found}. Use 'cpu', or see `tff-pdp doctor`")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if _state["deterministic at first use"] is None:
        _state["deterministic at first use"] = are_operations_deterministic()
    if match.group(2):
        return [(f"/GPU:{int(match.group(2))}",)]
    all_gpus = tuple(f"/GPU:{number}" for number in range(num_gpus))
    return [CPU, all_gpus] if name == "auto" else [all_gpus]


def resolve_device(name: str) -> str:
    """Returns TensorFlow's name for one device, such as `/GPU:0`; `gpu` and `auto` mean the first GPU if there is one.

    Raises:
      EngineError: as in `find_places`.
    """
    return find_places(name)[-1][0]


def gpus() -> list[str]:
    """Returns descriptions of the GPUs that TensorFlow can use, in the order of their numbers."""
    devices = tf.config.list_physical_devices("GPU")
    return [tf.config.experimental.get_device_details(device).get("device_name", device.name) for device in devices]


# Bits of sums on a GPU
# ---------------------


def use_deterministic_operations() -> None:
    """Makes TensorFlow use only kernels whose sums are reproducible to the bit, for the rest of the process.

    An operation without such a kernel raises `tf.errors.UnimplementedError` on a GPU. An operation that draws without a
    seed raises `tf.errors.InvalidArgumentError` on each device. The setting counts for computations that are traced
    later, and for kernels that are built later, so an engine that takes a GPU is built after this call. Results on the
    CPU keep their accuracy, but not all bits: some functions of TensorFlow, such as the cross entropy, use other
    operations.
    """
    tf.config.experimental.enable_op_determinism()


def are_operations_deterministic() -> bool:
    """Returns whether `use_deterministic_operations` has been called in this process, or TensorFlow's own function."""
    from tensorflow.python.framework import config  # It has no public name in TensorFlow 2.14.

    return config.is_op_determinism_enabled()


def gpu_arithmetic() -> Mapping[str, str] | None:
    """Returns what decides the bits of sums on this machine's GPUs: cards, driver, CUDA libraries, and a trial's bits.

    None if sums may differ from call to call, or the libraries are not known: operations are not deterministic, or
    were not when an engine first took a GPU; CUDA's libraries are not the packages of `requirements-gpu.txt`; or two
    trials had different bits.

    Assumes: TensorFlow's promise for deterministic operations, the same bits on the same hardware and software. The
    trial tests the promise on few operations, and proves nothing for others.
    """
    libraries = sorted(
        f"{package.name} {package.version}" for package in metadata.distributions() if _is_of_cuda(package.name)
    )
    if not (are_operations_deterministic() and _state["deterministic at first use"] and libraries):
        return None
    bits = trial_bits([f"/GPU:{number}" for number in range(len(gpus()))])
    if bits is None:
        return None
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    cards = {f"{card.get('device_name')} {card.get('compute_capability')}" for card in details}
    return {
        "cards": "; ".join(sorted(cards)),
        "driver": _DRIVER.read_text().splitlines()[0] if _DRIVER.is_file() else "unknown",
        "libraries": ", ".join(libraries),
        # Folders that come before the packages'.
        "library path": os.environ.get("LD_LIBRARY_PATH", ""),
        "trial": bits,
    }


def trial_bits(devices: Sequence[str]) -> str | None:
    """Computes a convolution, matrix products, long sums and their gradients on each device, twice.

    Returns:
      A digest of all bits, 16 hexadecimal digits; None if a device or a repetition had other bits.
    """
    found = set()
    for device in devices:
        for _ in range(2):
            with tf.device(device):
                found.add(_digest(_trial()))
    return found.pop() if len(found) == 1 else None


@tf.function
def _trial() -> list[Any]:
    images = tf.reshape(tf.cos(tf.range(32.0 * 16 * 16 * 3)), [32, 16, 16, 3])
    kernel = tf.reshape(tf.sin(tf.range(3.0 * 3 * 3 * 16)), [3, 3, 3, 16])
    matrix = tf.reshape(tf.sin(tf.range(8.0 * 8 * 16 * 10)), [8 * 8 * 16, 10])
    labels = tf.range(32) % 10
    with tf.GradientTape() as tape:
        tape.watch([images, kernel, matrix])
        hidden = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME")), 2, 2, "SAME")
        logits = tf.reshape(hidden, [32, -1]) @ matrix / 1000.0
        # Rows that are taken several times: their gradients meet in one sum.
        taken = tf.gather(logits, tf.range(512) % 32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.tile(labels, [16]), taken)
        loss = tf.reduce_mean(losses) + tf.reduce_sum(images**2)
    return [loss, *tape.gradient(loss, [images, kernel, matrix])]


def _digest(tensors: Sequence[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors)).hexdigest()[:16]


def _is_of_cuda(package: str | None) -> bool:
    return bool(package and re.fullmatch(r"nvidia[-_].*[-_]cu11", package))
