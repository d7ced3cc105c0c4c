"""Describes this machine without naming its host, names the folder of results, and measures the cost of commands.

The cost of a command is the processor time of all its processes, wall time, and peak memory.
"""

import dataclasses
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_SAMPLE_SECONDS = 0.1


def describe_machine(cpu_info: Path = Path("/proc/cpuinfo"), gpus: Sequence[str] = ()) -> str:
    """Describes processor, usable cores, memory, system and the GPUs used, without the host's name."""
    fields = dict(line.split(":", 1) for line in cpu_info.read_text().splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in fields.items()}
    model = f"{facts.get('model name', platform.machine())} (model {facts.get('model', '?')})"
    cores = len(os.sched_getaffinity(0))
    gibibytes = psutil.virtual_memory().total / 2**30
    used = " and ".join(gpus) or "no GPU"
    return f"{model}, {cores} cores, {gibibytes:.0f} GiB of memory, {platform.system()}; {used} used"


def gpu_names() -> list[str]:
    """Returns the names of NVIDIA's GPUs with the version of their driver, such as `NVIDIA H100 (driver 580.1)`.

    Raises:
      RuntimeError: `nvidia-smi` is absent, or finds no GPU.
    """
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"no GPU can be measured: {' '.join(command)} failed: {error}") from None
    rows = [line.split(", ") for line in done.stdout.splitlines() if line]
    if not rows:
        raise RuntimeError("no GPU can be measured: nvidia-smi finds none")
    return [f"{name} (driver {driver})" for name, driver in rows]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of a command.

    Attributes:
      cpu_s: seconds of processor time of all processes.
      wall_s: seconds from start to end.
      peak_rss_mb: largest resident memory of all processes together, sampled ten times a second.
      output: text that the command printed.
    """

    cpu_s: float
    wall_s: float
    peak_rss_mb: float
    output: str


def measure_command(command: Sequence[str]) -> Cost:
    """Runs a command to its end.

    Raises:
      RuntimeError: the command failed; the message ends with the command's last errors.
    """
    before = _children_seconds()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    peak = [0.0]
    watcher = threading.Thread(target=_watch, args=(process, peak), daemon=True)
    watcher.start()
    output, errors = process.communicate()
    wall = time.perf_counter() - start
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {process.returncode}: {errors[-2000:]}")
    return Cost(_children_seconds() - before, wall, peak[0], output)


def python_module(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs a module under this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch(process: subprocess.Popen, peak: list[float]) -> None:
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        for one in _family(root):
            try:
                total += one.memory_info().rss
            except psutil.Error:
                continue
        peak[0] = max(peak[0], total / 2**20)
        time.sleep(_SAMPLE_SECONDS)


def _family(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
