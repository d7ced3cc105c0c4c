"""Small jobs, many of them."""

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
