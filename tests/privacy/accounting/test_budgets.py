import math

import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budgets import SiloBudget, draw_epsilons, parse_budgets

SILOS = ["silo_b", "silo_a", "silo_c"]


def test_one_budget_for_all():
    assert parse_budgets({"kind": "one_for_all", "epsilon": 4, "delta": "1e-4"}, SILOS) == dict.fromkeys(sorted(SILOS), SiloBudget(4.0, 1e-4))


def test_cycle_follows_sorted_names():
    budgets = parse_budgets({"kind": "cycled", "epsilons": [1, 2], "delta": 1e-4}, SILOS)
    assert [(name, budget.epsilon) for name, budget in budgets.items()] == [
        ("silo_a", 1.0),
        ("silo_b", 2.0),
        ("silo_c", 1.0),
    ]


def test_named_silos_with_default():
    budgets = parse_budgets({"kind": "by_silo", "delta": 1e-4, "silos": {"silo_b": 0.5}, "default_epsilon": 8}, SILOS)
    assert {name: budget.epsilon for name, budget in budgets.items()} == {"silo_a": 8.0, "silo_b": 0.5, "silo_c": 8.0}
    assert parse_budgets({"kind": "by_silo", "delta": 1e-4, "silos": {7: 2}}, ["7"]) == {"7": SiloBudget(2.0, 1e-4)}


def test_a_silo_may_have_a_delta_of_its_own():
    config = {"silos": {"silo_a": {"kind": "one_for_all", "epsilon": 1, "delta": "1e-5"}, "silo_b": 2}, "default_epsilon": 3, "delta": 1e-4}
    assert parse_budgets(config, SILOS) == {
        "silo_a": SiloBudget(1.0, 1e-5),
        "silo_b": SiloBudget(2.0, 1e-4),
        "silo_c": SiloBudget(3.0, 1e-4),
    }
    own = {name: {"kind": "one_for_all", "epsilon": 1, "delta": 1e-5} for name in SILOS}
    assert parse_budgets({"silos": own}, SILOS)["silo_c"] == SiloBudget(1.0, 1e-5)


def test_a_file_of_budgets(tmp_path, monkeypatch):
    (tmp_path / "budgets.csv").write_text("silo,epsilon,delta\nsilo_b,2,1e-6\nsilo_a,1,\n")
    monkeypatch.chdir(tmp_path)
    assert parse_budgets({"file": "budgets.csv", "default_epsilon": 3, "delta": 1e-4}, SILOS) == {
        "silo_a": SiloBudget(1.0, 1e-4),
        "silo_b": SiloBudget(2.0, 1e-6),
        "silo_c": SiloBudget(3.0, 1e-4),
    }
    with pytest.raises(ConfigError, match=r"budgets\.csv has no epsilon for 1 silos, for example silo_c"):
        parse_budgets({"file": "budgets.csv", "delta": 1e-4}, SILOS)
    with pytest.raises(
        ConfigError, match=r"budgets\.csv, line 2: silo_b names no silo of this data set \(it has silo_a"
    ):
        parse_budgets({"file": "budgets.csv", "delta": 1e-4}, ["silo_a"])
    with pytest.raises(ConfigError, match="delta is missing, and silo 'silo_a' has no delta of its own"):
        parse_budgets({"file": "budgets.csv"}, ["silo_a", "silo_b"])


def test_a_distribution_of_budgets():
    drawn = {"kind": "log_uniform", "low": 1, "high": 2, "seed": 5}
    assert parse_budgets({"distribution": drawn, "delta": 1e-4}, SILOS) == {
        name: SiloBudget(epsilon, 1e-4) for name, epsilon in draw_epsilons(drawn, SILOS).items()
    }


def test_infinite_epsilon_asks_for_no_privacy():
    assert parse_budgets({"kind": "one_for_all", "epsilon": math.inf, "delta": 1e-4}, ["a"])["a"].epsilon == math.inf


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "exactly one is needed"),
        ({"kind": "one_for_all", "epsilon": 1, "cycle": [1], "delta": 1e-4}, "`epsilon` and `cycle`"),
        ({"epsilon": 1}, "delta is missing"),
        ({"kind": "one_for_all", "epsilon": 1, "delta": 0}, "budgets.delta is 0"),
        ({"kind": "one_for_all", "epsilon": 1, "delta": 1}, "budgets.delta is 1"),
        ({"kind": "one_for_all", "epsilon": 1, "delta": None}, "budgets.delta is None"),
        ({"kind": "one_for_all", "epsilon": 0, "delta": 1e-4}, "budgets.epsilon is 0"),
        ({"kind": "one_for_all", "epsilon": math.nan, "delta": 1e-4}, "budgets.epsilon is nan"),
        ({"kind": "one_for_all", "epsilon": True, "delta": 1e-4}, "budgets.epsilon is True"),
        ({"kind": "one_for_all", "epsilon": 1, "delta": 1e-4, "epsilom": 2}, "unknown key `epsilom`"),
        ({"cycle": [], "delta": 1e-4}, "budgets.cycle"),
        ({"cycle": [1, -2], "delta": 1e-4}, r"budgets.cycle\[1\] is -2"),
        ({"silos": {"silo_x": 1}, "default_epsilon": 1, "delta": 1e-4}, "silos.silo_x names no silo"),
        ({"silos": {"silo_a": 1}, "delta": 1e-4}, "2 silos, for example silo_b"),
        ({"silos": {"silo_a": "much"}, "delta": 1e-4}, "silos.silo_a is 'much'"),
        ({"silos": [1], "delta": 1e-4}, "must map silo names"),
        ({"silos": {"silo_a": {"delta": 1e-5}}, "delta": 1e-4}, "silos.silo_a.epsilon is missing"),
        ({"silos": {"silo_a": {"kind": "one_for_all", "epsilon": 1, "delta": 2}}, "delta": 1e-4}, "silos.silo_a.delta is 2"),
        ({"silos": dict.fromkeys(SILOS, 1), "default_epsilon": -1, "delta": 1e-4}, "default_epsilon is -1"),
        ({"distribution": {"kind": "log_uniform", "low": 1, "high": 2}}, "delta is missing"),
        ({"file": 3, "delta": 1e-4}, "budgets.file is 3"),
        ({"file": "budgets.csv", "cycle": [1], "delta": 1e-4}, "`file` and `cycle`"),
        ({"distribution": {}, "default_epsilon": 1, "delta": 1e-4}, "unknown key `default_epsilon`"),
    ],
)
def test_errors_name_the_key(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_budgets(config, SILOS)
