import argparse
import json
import subprocess
import sys

import pytest

from tff_pdp import account_command
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
        (["--noise-multiplier", "-1"], ConfigError, "noise_multiplier"),
        (["--noise-multiplier", "1", "--sampling-rate", "3"], ConfigError, "sampling_rate"),
        (["--epsilon", "1e-6"], BudgetError, "Raise epsilon"),
    ],
)
def test_bad_values(arguments, error, message):
    with pytest.raises(error, match=message):
        run(*arguments)


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
