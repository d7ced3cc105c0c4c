"""What several test folders share: one native engine, and one small client dataset written through the real job."""

import pytest


@pytest.fixture(scope="session")
def native_engine():
    """A started engine; tests call computations inside `with native_engine.install():`."""
    from tff_pdp.runtime.engines import build_engine

    engine = build_engine("native")
    yield engine
    engine.close()
