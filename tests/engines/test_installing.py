"""Computations go to the engine that was installed last and is still installed, however the blocks end."""

import contextlib
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.places import ROOT
from tff_pdp import _tff
from tff_pdp.errors import EngineError


class Named(_tff.SyncContext):
    """A context that answers with its name."""

    def __init__(self, name):
        self.name = name

    def invoke(self, comp, arg):
        return self.name


@_tff.tensorflow_computation
def asked():
    return np.int32(0)


def generator_of(context):
    """A generator that keeps a block open as long as somebody holds the generator."""
    with _tff.installed(context):
        yield


def test_the_newest_block_answers_and_the_end_of_a_block_gives_the_one_before_back():
    with _tff.installed(Named("outer")):
        assert asked() == "outer"
        with _tff.installed(Named("inner")):
            assert asked() == "inner"
        assert asked() == "outer"
    with pytest.raises(EngineError, match="No engine is installed"):
        asked()


def test_dropping_an_older_block_leaves_the_newer_one():
    held = generator_of(Named("older"))
    next(held)
    with _tff.installed(Named("newer")):
        del held
        gc.collect()
        assert asked() == "newer"
    with pytest.raises(EngineError, match="No engine is installed"):
        asked()


def test_a_context_that_is_installed_twice_is_removed_once():
    context = Named("twice")
    with contextlib.ExitStack() as older, contextlib.ExitStack() as newer:
        older.enter_context(_tff.installed(context))
        older.enter_context(_tff.installed(Named("between")))
        newer.enter_context(_tff.installed(context))
        older.close()
        assert asked() == "twice"


def test_a_block_that_another_thread_ends_is_removed_where_it_was_installed():
    held = generator_of(Named("here"))
    next(held)
    outcomes = []

    def end():
        with _tff.installed(Named("there")):
            held.close()
            outcomes.append(asked())

    thread = threading.Thread(target=end)
    thread.start()
    thread.join(30)
    assert outcomes == ["there"]
    with pytest.raises(EngineError, match="No engine is installed"):
        asked()


def test_engines_install_by_it(native_engine):
    from tff_pdp.engines.running import build_engine

    older = build_engine().install()
    older.__enter__()
    newer = native_engine.install()
    newer.__enter__()
    del older
    gc.collect()
    assert _tff.get_context_stack().current is native_engine._context
    newer.__exit__(None, None, None)
    with pytest.raises(EngineError, match="No engine is installed"):
        asked()


@pytest.mark.parametrize(("given", "found"), [({}, "LAZY"), ({"CUDA_MODULE_LOADING": "EAGER"}, "EAGER")])
def test_cuda_loads_kernels_when_they_are_used_unless_told_otherwise(given, found):
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_MODULE_LOADING"}
    program = "import os, tff_pdp; print(os.environ['CUDA_MODULE_LOADING'])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | given, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{found}\n"
