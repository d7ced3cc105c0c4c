"""What rows of the layout `exposure` hold, worked out by hand for the town of four of `test_rows`."""

import pytest

from beam_pipelines.contact_graph.rows import RowLayout
from tests.beam_pipelines.contact_graph.test_rows import by_person


def test_exposure(tmp_path):
    rows = by_person(tmp_path, layout="exposure", num_slots=3)
    # One of three slots, and 9 of 24 hours, on the last two of three days: 255 sqrt(1/3), 255 sqrt(3/8), ...
    with_second = numbers((147, 147, 120), (156, 156, 128))
    assert rows["row"][1] == (with_second, 0)
    # One of three slots with 9 hours on the first day, another with 24 hours on the second, none on the third.
    assert rows["test"][1] == (numbers((0, 104, 120), (0, 180, 173)), 1)
    # More than 24 hours a day count as 24.
    assert rows["row"][4] == (numbers((147, 147, 120), (255, 255, 208)), 1)


def test_nobody_is_exposed_who_has_fallen_ill_or_met_nobody_ill(tmp_path):
    rows = by_person(tmp_path, layout="exposure", num_slots=3)
    assert rows["row"][2] == rows["test"][2] == ({}, 0)
    assert rows["row"][3] == ({}, 1)


@pytest.mark.parametrize(("window_days", "size"), [(1, 2), (3, 6), (6, 8), (21, 10)])
def test_as_many_numbers_as_there_are_days_for(window_days, size):
    layout = RowLayout("exposure", 4, window_days)
    assert len(set(layout.names)) == layout.size == size
    assert RowLayout("exposure", 0, window_days).names == RowLayout("summary", 0, window_days).names


def numbers(infectious, hours):
    """Of the last one, two and three days; those that are not zero."""
    found = {f"contacts_infectious_last{span}": value for span, value in enumerate(infectious, 1)}
    found |= {f"hours_with_infectious_last{span}": value for span, value in enumerate(hours, 1)}
    return {name: value for name, value in found.items() if value}
