import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.disk import small_disk

__all__ = ["small_disk"]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """`fault.c`, compiled, or None; and why there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None, "there is no C compiler `cc`, which makes the layer that fails calls"
    library = tmp_path_factory.mktemp("fault") / "libfault.so"
    source = Path(__file__).with_name("fault.c")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return None, f"the layer that fails calls cannot be compiled here: {done.stderr.strip()}"
    return library, ""


@pytest.fixture(scope="session")
def start_workers(calibrations, compiled):
    """A function that starts processes for commands; they end with the tests."""
    from tests.faults.workers import Workers

    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(Workers(calibrations, library=compiled[0], **options))


@pytest.fixture(scope="session")
def workers(start_workers):
    """Forks a process for each command."""
    return start_workers()


@pytest.fixture
def workers_under_faults(workers, compiled):
    """The same, where calls can be made to fail; elsewhere the test is skipped."""
    if compiled[0] is None:
        pytest.skip(compiled[1])
    return workers


@pytest.fixture(scope="module")
def make_experiments(tmp_path_factory):
    """A function: the small experiment of a kind, prepared once for each choice of settings."""
    from tests.faults.trials import make_experiment

    known = {}

    def look_up(kind, **training):
        key = (kind, *sorted(training.items()))
        if key not in known:
            known[key] = make_experiment(kind, tmp_path_factory.mktemp(kind), **training)
        return known[key]

    return look_up
