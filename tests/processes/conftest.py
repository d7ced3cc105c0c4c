"""Leaves the other engines to `make test-all`, where a test is about a process and not about its engine."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the tests that run on each engine in turn; those that compare engines are none of them."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent.name == "processes" and params.get("engine", "loop") != "loop":
            item.add_marker(pytest.mark.all)
