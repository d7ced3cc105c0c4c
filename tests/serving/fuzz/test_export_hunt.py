"""The hunt for exports that end whoever loads them finds none."""

import sys

import pytest

from tests.serving.fuzz import export_hunt


@pytest.mark.hurt
@pytest.mark.timeout(3600)
def test_no_damaged_export_ends_the_process_that_loads_it(tmp_path, monkeypatch):
    arguments = ["--exports", "300", "--seed", "11", "--keep", str(tmp_path / "found")]
    monkeypatch.setattr(sys, "argv", ["export_hunt", *arguments])
    assert export_hunt.main() == 0
