"""What experiments of many tests share: compiled computations, one engine for each way to compute, calibrations.

To trace a round takes a second, to start an engine and to calibrate noise takes others, and each of some 150 small
trainings would do all of that again. Results are the same: hyper-parameters, noise, data and seeds are arguments of a
computation, and a calibration is a function of its arguments.
"""

import contextlib
import functools
import hashlib
import os
import pickle
from pathlib import Path

import pytest

# Those of experiments, from settings to served models.
FOLDERS = [("tests", name) for name in ("api", "experiment", "training", "personal_models", "e2e", "faults")]
# Those that only calibrate noise.
CALIBRATING = [("tests", "reproduce"), ("tests", "privacy", "plans")]


@pytest.fixture(scope="session")
def kept_computations():
    """Computations by what decides them, for the whole run."""
    return {}


@pytest.fixture(scope="session")
def lent_engines():
    """Engines of this process by their options; closed at the end of the run."""
    with contextlib.ExitStack() as stack:
        yield stack, {}


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory, worker_id):
    """A folder of results of the accountants, which all workers of the run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "calibrations"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def kept_runs(request):
    """Experiments of the folders that train share with others what takes time to make."""
    # Not below the checkout: in a sandbox a test lies elsewhere, and this module is a link to it.
    parts = request.path.relative_to(request.config.rootpath).parts
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if parts[:2] in FOLDERS:
            stack.enter_context(request.getfixturevalue("keep_runs")(patch))
        if parts[:2] in FOLDERS or any(parts[: len(folder)] == folder for folder in CALIBRATING):
            request.getfixturevalue("keep_calibrations")(patch)
        yield


@pytest.fixture(scope="session")
def keep_calibrations(calibrations):
    """A function, by whose patches the accountants look up what they have computed before."""
    return functools.partial(look_up_calibrations, calibrations)


@pytest.fixture(scope="session")
def keep_runs(kept_computations, lent_engines):
    """A context manager, in which experiments share what the whole run keeps."""
    return functools.partial(keeping_runs, kept_computations, *lent_engines)


def look_up_calibrations(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes the accountants look up in a folder what they have computed before, until the patch is undone."""
    from tff_pdp.privacy.accounting import accountants

    for name in ("_draft_epsilon", "_bounds_of_parts"):
        patch.setattr(accountants, name, _on_disk(getattr(accountants, name), folder))


@contextlib.contextmanager
def keeping_runs(computations, stack: contextlib.ExitStack, engines, patch: pytest.MonkeyPatch):
    """Lends experiments what is kept: computations, and engines, which the stack closes at its end."""
    from tff_pdp.engines.running import build_engine, running_engine
    from tff_pdp.experiment import build

    @contextlib.contextmanager
    def lent_engine(name="inprocess", device="auto", **options):
        # `auto` finds out what is faster, which is what some tests are about. XLA's choices are on each run's record.
        if name != "inprocess" or options.get("client_parallelism") == "auto" or options.get("xla") == "always":
            with running_engine(name, device, **options) as engine:
                yield engine
            return
        options.pop("choices", None)
        key = (device, *sorted(options.items()))
        if key not in engines:
            engines[key] = stack.enter_context(contextlib.closing(build_engine(name, device, **options)))
        with engines[key].install():
            yield engines[key]

    patch.setattr(build, "running_engine", lent_engine)
    with build.keep_computations(computations):
        yield


def _on_disk(function, folder: Path):
    """The function, with results in files by its arguments, whose texts tell all of them."""

    @functools.wraps(function)
    def look_up(*arguments):
        text = f"{function.__module__}.{function.__name__}{arguments!r}"
        path = folder / hashlib.sha256(text.encode()).hexdigest()
        if path.exists():
            return pickle.loads(path.read_bytes())
        result = function(*arguments)
        # Whole or not at all: the other worker may be reading.
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(result))
        own.replace(path)
        return result

    return look_up
