"""Lists a round's arithmetic: the hardware, software and settings on which the rounding of its sums depends.

Two releases that add the same noise to differently rounded sums would reveal what the noise hides. So a round is
repeated with the same random draws only if the arithmetic is unchanged.
"""

import hashlib
import json
import os
import platform
import secrets
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import tff_pdp
from tff_pdp.engines.base import LIBRARY_SETTINGS
from tff_pdp.privacy.facts import Generator

# Folders of the package whose code decides the result of a round: with the same key, other code may draw and round
# differently.
_ROOMS = ("data", "models", "algorithms", "privacy", "processes", "engines", "experiment", "training")
# Settings of logs change no result.
_NOT_DECISIVE = "TF_CPP_"
_LIBRARIES = ("tensorflow", "numpy", "tensorflow-federated", "tensorflow-privacy")
_PROCESSOR = Path("/proc/cpuinfo")


def arithmetic_of(
    engine: str,
    device: str,
    *,
    is_deterministic: bool,
    generator: Generator = "philox",
    gpu: Mapping[str, str] | None = None,
) -> dict[str, str | int]:
    """Returns the conditions that decide how sums are rounded on this machine, as plain data: the arithmetic.

    Args:
      engine: name of the engine.
      device: the engine's device.
      is_deterministic: whether the device computes the same sums to the same bits each time. If not, each call returns
        another arithmetic, so that no round is repeated.
      generator: random number generator of computations.
      gpu: what decides the bits of sums on the GPUs that the engine may take, from `engines.devices.gpu_arithmetic`.
    """
    # Imported only where rounds are run: readers of records do not need it.
    import tensorflow as tf

    from tff_pdp.engines.devices import are_operations_deterministic
    from tff_pdp.privacy.mechanisms.random_bits import gpu_is_visible

    found: dict[str, str | int] = {
        "sources": _SOURCES,
        "engine": engine,
        "device": device,
        "processor": _processor(),
        # Sums of many rows are divided among them.
        "processors": len(os.sched_getaffinity(0)),
        **{library: metadata.version(library) for library in _LIBRARIES},
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        # On the CPU as well, they are other operations.
        "operations": "deterministic" if are_operations_deterministic() else "any",
        # If a GPU is visible, bits, batches and clips have other operations, on the CPU as well.
        "form": "for a GPU" if gpu_is_visible() else "for the CPU",
        "jit": str(tf.config.optimizer.get_jit()),
        "build": f"{tf.version.GIT_VERSION} {tf.version.COMPILER_VERSION}",
        "variables": json.dumps(_variables()),
        "generator": generator,
        **{f"gpu {name}": value for name, value in (gpu or {}).items()},
    }
    return found if is_deterministic else {**found, "once": secrets.token_hex(8)}


def of_first_version(arithmetic: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record of arithmetic without the digest of the source code, which the first version did not record.

    >>> of_first_version({"sources": "0123", "device": "cpu"})
    {'device': 'cpu'}
    """
    return {name: value for name, value in arithmetic.items() if name != "sources"}


def _variables() -> dict[str, str]:
    """Returns the settings of libraries in the environment, with the content of files that they name."""
    names = [
        name for name in sorted(os.environ) if name.startswith(LIBRARY_SETTINGS) and not name.startswith(_NOT_DECISIVE)
    ]
    values = {name: os.environ[name] for name in names}
    files = {name: Path(value) for name, value in values.items() if value and not value.startswith("-")}
    return values | {
        f"{name} file": hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()
    }


def _digest_of_sources() -> str:
    package = Path(str(tff_pdp.__file__)).parent
    files = [package / "_tff.py", *(file for room in _ROOMS for file in (package / room).rglob("*.py"))]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(package)}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


# Read when this module is loaded, so very nearly the code that is running.
_SOURCES = _digest_of_sources()


def _processor() -> str:
    """Returns name and features of the processor, by which libraries choose their instructions."""
    try:
        lines = _PROCESSOR.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    values = {key.strip(): value.strip() for key, value in first.items()}
    name, features = values.get("model name", platform.machine()), values.get("flags", values.get("Features", ""))
    return f"{name} {hashlib.sha256(' '.join(sorted(features.split())).encode()).hexdigest()[:16]}"
