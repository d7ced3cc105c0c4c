import math

import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.budgets import SiloBudget, parse_budgets

SILOS = ["silo_b", "silo_a", "silo_c"]


def test_one_budget_for_all():
    assert parse_budgets({"epsilon": 4, "delta": "1e-4"}, SILOS) == dict.fromkeys(sorted(SILOS), SiloBudget(4.0, 1e-4))


def test_cycle_follows_sorted_names():
    budgets = parse_budgets({"delta": 1e-4, "cycle": [1, 2]}, SILOS)
    assert [(name, budget.epsilon) for name, budget in budgets.items()] == [
        ("silo_a", 1.0),
        ("silo_b", 2.0),
        ("silo_c", 1.0),
    ]


def test_named_silos_with_default():
    budgets = parse_budgets({"delta": 1e-4, "silos": {"silo_b": 0.5}, "default_epsilon": 8}, SILOS)
    assert {name: budget.epsilon for name, budget in budgets.items()} == {"silo_a": 8.0, "silo_b": 0.5, "silo_c": 8.0}
    assert parse_budgets({"delta": 1e-4, "silos": {7: 2}}, ["7"]) == {"7": SiloBudget(2.0, 1e-4)}


def test_infinite_epsilon_asks_for_no_privacy():
    assert parse_budgets({"epsilon": math.inf, "delta": 1e-4}, ["a"])["a"].epsilon == math.inf


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "exactly one is needed"),
        ({"epsilon": 1, "cycle": [1], "delta": 1e-4}, "`epsilon` and `cycle`"),
        ({"epsilon": 1}, "delta is missing"),
        ({"epsilon": 1, "delta": 0}, "budgets.delta is 0"),
        ({"epsilon": 1, "delta": 1}, "budgets.delta is 1"),
        ({"epsilon": 1, "delta": None}, "budgets.delta is None"),
        ({"epsilon": 0, "delta": 1e-4}, "budgets.epsilon is 0"),
        ({"epsilon": math.nan, "delta": 1e-4}, "budgets.epsilon is nan"),
        ({"epsilon": True, "delta": 1e-4}, "budgets.epsilon is True"),
        ({"epsilon": 1, "delta": 1e-4, "epsilom": 2}, "unknown key `epsilom`"),
        ({"cycle": [], "delta": 1e-4}, "budgets.cycle"),
        ({"cycle": [1, -2], "delta": 1e-4}, r"budgets.cycle\[1\] is -2"),
        ({"silos": {"silo_x": 1}, "default_epsilon": 1, "delta": 1e-4}, "silos.silo_x names no silo"),
        ({"silos": {"silo_a": 1}, "delta": 1e-4}, "2 silos, for example silo_b"),
        ({"silos": {"silo_a": "much"}, "delta": 1e-4}, "silos.silo_a is 'much'"),
        ({"silos": [1], "delta": 1e-4}, "must map silo names"),
    ],
)
def test_errors_name_the_key(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_budgets(config, SILOS)
