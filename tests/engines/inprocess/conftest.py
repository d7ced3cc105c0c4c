"""Engines for the tests of the in-process engine."""

import pytest

from tests.engines.inprocess.inprocess_support import MODES, inprocess


@pytest.fixture(params=MODES)
def mode(request):
    """Each way to compute clients in turn."""
    return request.param


@pytest.fixture
def engine(mode):
    """An engine that has traced nothing yet; tests call computations inside `with engine.install():`."""
    with inprocess(mode) as built:
        yield built
