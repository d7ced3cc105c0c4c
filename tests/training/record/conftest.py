"""Whole runs of every kind, made once for all modules of this folder."""

import contextlib

import pytest

from tests.training.record.whole_runs import MAKERS


@pytest.fixture(scope="session")
def whole_runs(tmp_path_factory, fresh_process):
    """Every kind of run, by name; tests damage copies of them."""
    from serving.export import exporter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "FreshProcess", lambda: contextlib.nullcontext(fresh_process))
        return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}
