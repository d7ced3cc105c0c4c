import tomllib

import pytest

from tests import budget
from tests.places import ROOT

SPENT = {"tests/data/test_a.py": 6.0, "tests/data/test_b.py x": 8.0, "doctests of serving": 1.0, budget.START: 40.0}


def test_seconds_are_stated_as_on_the_machine_of_the_budgets():
    allowed = {"reference": 0.1, "test": {"tests/data": 14, "doctests of serving": 1, budget.START: 1}}
    lines, beyond = budget.summary("test", allowed, 0.2, SPENT)
    assert lines[1].split() == [*budget.START.split(), "20", "1", "more", "than", "its", "budget"]
    assert lines[2].split() == ["tests/data", "7", "14"]
    assert beyond == [budget.START]
    # Here it is as fast as there, and 14 seconds are all that the folder has.
    assert budget.summary("test", {**allowed, "reference": 0.2}, 0.2, SPENT)[1] == [budget.START]


@pytest.mark.parametrize(("seconds", "is_beyond"), [(100.0, False), (149.0, False), (151.0, True)])
def test_a_folder_may_spend_half_as_much_again(seconds, is_beyond):
    _, beyond = budget.summary("all", {"all": {"tests/data": 100}}, 0.1, {"tests/data/test_a.py": seconds})
    assert bool(beyond) == is_beyond


def test_a_folder_without_a_budget_is_shown_and_spends_what_it_likes():
    lines, beyond = budget.summary("all", {"all": {"tests/models": 3}}, 0.1, SPENT)
    assert not beyond and ["tests/data", "14", "-"] in [line.split() for line in lines]


def test_what_is_written_is_read_again_and_other_tiers_stay():
    before = {"reference": 0.1, "test": {"tests/models": 3}, "groups": {"tests/models/test_c.py": 9.0}}
    after = tomllib.loads(budget.written("all", before, 0.2, SPENT))
    assert after["reference"] == 0.1 and after["test"] == before["test"]
    assert after["all"] == {"tests/data": 7, "doctests of serving": 1, budget.START: 20}
    # Heavy groups alone.
    assert after["groups"] == {"tests/models/test_c.py": 9.0, "tests/data/test_b.py x": 4.0}
    assert budget.summary("all", after, 0.2, SPENT)[1] == []


def test_make_runs_the_tiers_that_have_budgets():
    makefile = (ROOT / "Makefile").read_text()
    for expression in ('-m "not all and not hurt"', '-m "not hurt"', "-m hurt"):
        assert expression in makefile
        assert expression.removeprefix("-m ").strip('"') in budget.TIERS
