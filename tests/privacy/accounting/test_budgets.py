import math

import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budgets import Budgets, SiloBudget
from tff_pdp.settings import read_settings

SILOS = ["silo_b", "silo_a", "silo_c"]
FOR_ALL = {"kind": "one_for_all", "epsilon": 1, "delta": 1e-4}


def budgets_of(content, client_ids):
    return read_settings(Budgets, content, "test", "privacy.budgets").assign(client_ids)


def test_one_budget_for_all():
    content = {"kind": "one_for_all", "epsilon": 4, "delta": 1e-4}
    assert budgets_of(content, SILOS) == dict.fromkeys(sorted(SILOS), SiloBudget(4.0, 1e-4))


def test_cycle_follows_sorted_names():
    budgets = budgets_of({"kind": "cycled", "delta": 1e-4, "epsilons": [1, 2]}, SILOS)
    assert [(name, budget.epsilon) for name, budget in budgets.items()] == [
        ("silo_a", 1.0),
        ("silo_b", 2.0),
        ("silo_c", 1.0),
    ]


def test_named_silos_with_default():
    budgets = budgets_of({"kind": "by_silo", "delta": 1e-4, "silos": {"silo_b": 0.5}, "default_epsilon": 8}, SILOS)
    assert {name: budget.epsilon for name, budget in budgets.items()} == {"silo_a": 8.0, "silo_b": 0.5, "silo_c": 8.0}


def test_a_silo_may_have_a_delta_of_its_own():
    silos = {"silo_a": {"epsilon": 1, "delta": 1e-5}, "silo_b": 2}
    assert budgets_of({"kind": "by_silo", "silos": silos, "default_epsilon": 3, "delta": 1e-4}, SILOS) == {
        "silo_a": SiloBudget(1.0, 1e-5),
        "silo_b": SiloBudget(2.0, 1e-4),
        "silo_c": SiloBudget(3.0, 1e-4),
    }
    own = {name: {"epsilon": 1, "delta": 1e-5} for name in SILOS}
    assert budgets_of({"kind": "by_silo", "silos": own}, SILOS)["silo_c"] == SiloBudget(1.0, 1e-5)


def test_a_file_of_budgets(tmp_path, monkeypatch):
    (tmp_path / "budgets.csv").write_text("silo,epsilon,delta\nsilo_b,2,1e-6\nsilo_a,1,\n")
    monkeypatch.chdir(tmp_path)
    content = {"kind": "from_file", "file": "budgets.csv", "delta": 1e-4}
    assert budgets_of({**content, "default_epsilon": 3}, SILOS) == {
        "silo_a": SiloBudget(1.0, 1e-4),
        "silo_b": SiloBudget(2.0, 1e-6),
        "silo_c": SiloBudget(3.0, 1e-4),
    }
    with pytest.raises(ConfigError, match=r"budgets\.csv has no epsilon for 1 silos, for example 'silo_c'"):
        budgets_of(content, SILOS)
    with pytest.raises(
        ConfigError, match=r"budgets\.csv, line 2: silo_b names no silo of this data set \(known: silo_a"
    ):
        budgets_of(content, ["silo_a"])
    with pytest.raises(
        ConfigError, match=r"missing key privacy\.budgets\.delta: silo 'silo_a' has no delta of its own"
    ):
        budgets_of({"kind": "from_file", "file": "budgets.csv"}, ["silo_a", "silo_b"])


def test_infinite_epsilon_asks_for_no_privacy():
    assert budgets_of({**FOR_ALL, "epsilon": math.inf}, ["a"])["a"].epsilon == math.inf


@pytest.mark.parametrize(
    "content, message",
    [
        ({}, "missing key privacy.budgets.kind: one of one_for_all, cycled, drawn, by_silo, from_file"),
        ({"kind": "one_for_all", "epsilon": 1}, "missing key privacy.budgets.delta"),
        ({**FOR_ALL, "delta": 0}, "budgets.delta must be a number above 0 and below 1, not 0"),
        ({**FOR_ALL, "delta": 1}, "budgets.delta must be .*, not 1"),
        ({**FOR_ALL, "delta": None}, "budgets.delta must be .*, not None"),
        ({**FOR_ALL, "delta": "1e-5"}, "budgets.delta must be .*, not '1e-5'"),
        ({**FOR_ALL, "epsilon": 0}, "budgets.epsilon must be a number above 0, not 0"),
        ({**FOR_ALL, "epsilon": math.nan}, "budgets.epsilon must be .*, not nan"),
        ({**FOR_ALL, "epsilon": True}, "budgets.epsilon must be .*, not True"),
        ({**FOR_ALL, "epsilom": 2}, "unknown key privacy.budgets.epsilom; did you mean epsilon"),
        ({"kind": "cycled", "epsilons": [], "delta": 1e-4}, "budgets.epsilons must be a list"),
        ({"kind": "cycled", "epsilons": [1, -2], "delta": 1e-4}, r"budgets.epsilons\[1\] must be .*, not -2"),
        ({"kind": "by_silo", "silos": {"silo_x": 1}, "default_epsilon": 1}, "silos.silo_x names no silo"),
        ({"kind": "by_silo", "silos": {"silo_a": 1}, "delta": 1e-4}, "2 silos, for example 'silo_b'"),
        ({"kind": "by_silo", "silos": {"silo_a": "much"}}, "silos.silo_a must be .*, not 'much'"),
        ({"kind": "by_silo", "silos": [1]}, "silos must be a mapping from names"),
        ({"kind": "by_silo", "silos": {"silo_a": {"delta": 1e-5}}}, "missing key privacy.budgets.silos.silo_a.epsilon"),
        ({"kind": "by_silo", "silos": {"silo_a": {"epsilon": 1, "delta": 2}}}, "silos.silo_a.delta must be .*, not 2"),
        ({"kind": "by_silo", "silos": {}, "default_epsilon": -1}, "default_epsilon must be .*, not -1"),
        ({"kind": "from_file", "file": 3, "delta": 1e-4}, "budgets.file must be text that is not empty, not 3"),
        ({"kind": "from_file", "file": "b.csv", "cycle": [1]}, "unknown key privacy.budgets.cycle"),
    ],
)
def test_errors_name_the_key(content, message):
    with pytest.raises(ConfigError, match=message):
        budgets_of(content, SILOS)


def test_with_level_minimum_noise_suits_the_least_epsilon_and_each_silos_own_delta():
    silos = {"silo_a": {"epsilon": 3, "delta": 1e-5}, "silo_b": 0.5, "silo_c": math.inf}
    content = {"kind": "by_silo", "silos": silos, "delta": 1e-4}
    own, least = (read_settings(Budgets, {**content, "level": level}, "test") for level in ("own", "minimum"))
    budgets = least.assign(SILOS)
    # The budgets themselves stay what they are.
    assert budgets == own.assign(SILOS) == own.calibrated_to(budgets)
    assert least.calibrated_to(budgets) == {
        "silo_a": SiloBudget(0.5, 1e-5),
        "silo_b": SiloBudget(0.5, 1e-4),
        "silo_c": SiloBudget(0.5, 1e-4),
    }
    with pytest.raises(ConfigError, match=r"level must be one of minimum, own, not 'maximum'"):
        read_settings(Budgets, {**content, "level": "maximum"}, "test")
