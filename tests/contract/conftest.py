"""Chooses the contract tests that `make test` leaves to `make test-all`: see `covering.py`."""

import pytest

# Each traces a computation of its own.
TRACING = {"test_no_coordinate_of_a_release_is_without_noise"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks combinations that others stand for; before pytest takes out what is marked."""
    # TensorFlow is imported here, where contract tests are run, and not in every run of other tests.
    mine = [item for item in items if item.path.parent.name == "contract" and hasattr(item, "callspec")]
    if not mine:
        return
    from tests.contract.contract_support import LARGE
    from tests.contract.covering import COVERING, COVERING_LARGE

    for item in mine:
        params = item.callspec.params
        name = params.get("built")
        if name is None:
            continue
        if "model" in params:
            is_covered = name in (COVERING_LARGE if params["model"] is LARGE else COVERING)
        else:
            is_covered = name in COVERING or (
                params.get("engine", "loop") == "loop" and item.originalname not in TRACING
            )
        if not is_covered:
            item.add_marker(pytest.mark.all)
