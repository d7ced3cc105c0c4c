"""What the bits of a round depend on besides the run: a round that is repeated under another has other bits.

Two releases with the same noise and other rounding of what is below it would show what the noise hides. So rounds are
repeated with the same draws only where all of this is as it was.
"""

import hashlib
import os
import platform
import secrets
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tff_pdp.privacy.facts import Generator

# How bits of a key become cohorts, batches and noise. A change in the code by which the same key draws otherwise raises
# it: rounds of runs that were begun before are then drawn anew, and charged. Runs of the first way have no such entry.
DRAWS = 4
_PROCESSOR = Path("/proc/cpuinfo")


def arithmetic_of(
    engine: str, device: str, *, is_deterministic: bool, generator: Generator = "philox"
) -> dict[str, str | int]:
    """What decides how sums are rounded here, as plain data.

    Args:
      engine: name of the engine.
      device: its device.
      is_deterministic: whether the device repeats its own sums to the bit; where not, nothing equals the result.
      generator: of random bits in computations.
    """
    found: dict[str, str | int] = {
        "draws": DRAWS,
        "engine": engine,
        "device": device,
        "processor": _processor(),
        "tensorflow": metadata.version("tensorflow"),
        "numpy": metadata.version("numpy"),
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", ""),
    }
    # Runs of earlier versions, which have no such entry, drew from Philox.
    if generator != "philox":
        found["generator"] = generator
    return found if is_deterministic else {**found, "once": secrets.token_hex(8)}


def of_first_version(arithmetic: Mapping[str, Any]) -> dict[str, Any]:
    """The same where a run without a record was begun: its draws were others.

    >>> of_first_version({"draws": 3, "device": "cpu"})
    {'device': 'cpu'}
    """
    return {name: value for name, value in arithmetic.items() if name != "draws"}


def _processor() -> str:
    """Name and features of the processor, by which libraries choose their instructions."""
    try:
        lines = _PROCESSOR.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    values = {key.strip(): value.strip() for key, value in first.items()}
    name, features = values.get("model name", platform.machine()), values.get("flags", values.get("Features", ""))
    return f"{name} {hashlib.sha256(' '.join(sorted(features.split())).encode()).hexdigest()[:16]}"
