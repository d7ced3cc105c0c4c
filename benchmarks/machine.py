"""Says what machine this is, in words that do not tell whose, and where measurements are written."""

import os
import platform
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def describe_machine(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Processor, usable cores, memory and system, without any name of the host."""
    fields = dict(line.split(":", 1) for line in cpu_info.read_text().splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in fields.items()}
    model = f"{facts.get('model name', platform.machine())} (model {facts.get('model', '?')})"
    cores = len(os.sched_getaffinity(0))
    gibibytes = psutil.virtual_memory().total / 2**30
    return f"{model}, {cores} cores, {gibibytes:.0f} GiB of memory, {platform.system()}; no GPU used"
