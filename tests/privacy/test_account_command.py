import argparse
import json
import subprocess
import sys

import pytest

from tff_pdp import account_command, cli
from tff_pdp.errors import BudgetError, ConfigError

PLAN = ["--unit", "silo_example", "--sampling-rate", "0.032", "--steps", "1000", "--delta", "1e-5"]


def run(*arguments):
    parser = argparse.ArgumentParser()
    account_command.add_arguments(parser)
    return account_command.run(parser.parse_args([*PLAN, *arguments]))


def test_json(capsys):
    assert run("--noise-multiplier", "1", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon_rdp"] == pytest.approx(7.239, rel=1e-2)
    assert result["epsilon_pld"] == pytest.approx(6.589, rel=1e-2)
    assert result["epsilon"] == min(result["epsilon_rdp"], result["epsilon_pld"])
    assert result["unit"] == "silo_example" and result["adjacency"] == "add_or_remove_one"


def test_calibration(capsys):
    assert run("--epsilon", "2", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] <= result["epsilon_target"] == 2.0
    assert result["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert run("--noise-multiplier", str(result["noise_multiplier"]), "--json") == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == result["epsilon"]


def test_text_names_unit_and_adjacency(capsys):
    run("--epsilon", "2")
    text = capsys.readouterr().out
    assert "epsilon <= 2.0000" in text and "one record of one silo" in text and "add/remove" in text
    run("--noise-multiplier", "0")
    assert "infinite" in capsys.readouterr().out


def test_no_noise_is_valid_json(capsys):
    run("--noise-multiplier", "0", "--json")
    assert json.loads(capsys.readouterr().out)["epsilon"] is None


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (["--epsilon", "-1"], ConfigError, "--epsilon is -1"),
        (["--epsilon", "nan"], ConfigError, "--epsilon is nan"),
        (["--epsilon", "1", "--delta", "2"], ConfigError, "delta is 2"),
        (["--epsilon", "1", "--delta", "nan"], ConfigError, "--delta is nan"),
        (["--epsilon", "1", "--steps", "0"], ConfigError, "--steps is 0"),
        (["--noise-multiplier", "1", "--steps", "0"], ConfigError, "--steps is 0"),
        (["--noise-multiplier", "1", "--steps", "1.5"], ConfigError, "--steps is 1.5"),
        (["--noise-multiplier", "1", "--steps", "1e18"], ConfigError, "--steps is 1"),
        (["--noise-multiplier", "-1"], ConfigError, "--noise-multiplier is -1"),
        (["--noise-multiplier", "1e200"], ConfigError, "--noise-multiplier is 1e[+]200"),
        (["--noise-multiplier", "1", "--sampling-rate", "3"], ConfigError, "--sampling-rate is 3"),
        (["--noise-multiplier", "1", "--sampling-rate", "1e-200"], ConfigError, "--sampling-rate is 1"),
        (["--epsilon", "1e-6"], BudgetError, "Raise epsilon"),
    ],
)
def test_bad_values(arguments, error, message):
    with pytest.raises(error, match=message):
        run(*arguments)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-1e-3"])
@pytest.mark.parametrize("option", ["--epsilon", "--noise-multiplier", "--delta", "--sampling-rate", "--steps"])
def test_values_that_are_no_quantity_get_one_line_and_status_2(option, value, capsys):
    plans = [[]] if option in ("--epsilon", "--noise-multiplier") else [["--epsilon", "1"], ["--noise-multiplier", "1"]]
    for plan in plans:
        assert cli.main(["account", *PLAN, *plan, option, value]) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1
        assert output.err.startswith(f"tff-pdp account: {option} is {float(value):g}; it must be")


@pytest.mark.parametrize("noise", ["1e-200", "1e-6", "9e-4"])
def test_next_to_no_noise_is_no_protection(noise, capsys):
    assert run("--noise-multiplier", noise, "--json") == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] is None
    assert run("--noise-multiplier", noise) == 0
    assert "epsilon is infinite" in capsys.readouterr().out


def test_noise_and_epsilon_exclude_each_other():
    for arguments in ([], ["--epsilon", "1", "--noise-multiplier", "1"]):
        with pytest.raises(SystemExit):
            run(*arguments)


def test_tensorflow_is_not_loaded():
    code = (
        "import sys, tff_pdp.account_command, tff_pdp.privacy.ledger, tff_pdp.privacy.budgets\n"
        "assert 'tensorflow' not in sys.modules and 'tensorflow_federated' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
