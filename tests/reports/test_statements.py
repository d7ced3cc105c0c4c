"""Every sentence of the privacy statements, word for word."""

import json

import pytest

from tests.reports.statement_cases import STATEMENTS, by_text

GOLDEN = json.loads(STATEMENTS.read_text())
FOUND = by_text()


@pytest.mark.parametrize("heading", GOLDEN)
def test_readers_get_the_same_words(heading):
    assert FOUND[heading] == GOLDEN[heading]


def test_nothing_is_stated_that_is_not_compared():
    assert list(FOUND) == list(GOLDEN)
