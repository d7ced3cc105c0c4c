import json
import subprocess
import sys

import pytest

from tests.privacy.accounting.anchor_support import CALIBRATED
from tests.rounding import as_printed, half_a_digit
from tests.unrun import parse
from tff_pdp import cli
from tff_pdp.errors import BudgetError, ConfigError

PLAN = ["--unit", "silo_example", "--sampling-rate", "0.032", "--steps", "1000", "--delta", "1e-5"]


def run(*arguments):
    return cli.main(["account", *PLAN, *arguments])


def test_json(capsys):
    assert run("--noise-multiplier", "1", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon_rdp"] == as_printed("7.239")
    # The figure is of a coarser grid, to which privacy losses are rounded up.
    assert 6.5 < result["epsilon_pld"] < 6.589 + half_a_digit("6.589")
    assert result["epsilon"] == min(result["epsilon_rdp"], result["epsilon_pld"])
    assert result["unit"] == "silo_example" and result["adjacency"] == "add_or_remove_one"


def test_calibration(capsys):
    assert run("--epsilon", "2", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] <= result["epsilon_target"] == 2.0
    # Epsilon falls with the noise's third power at most.
    assert result["epsilon"] > 2.0 * (1 - 3 * CALIBRATED)
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
        (["--epsilon", "-1"], ConfigError, "--epsilon must be a number above 0, not '-1'"),
        (["--epsilon", "nan"], ConfigError, "--epsilon must be a number above 0, not 'nan'"),
        (["--epsilon", "1", "--delta", "2"], ConfigError, "--delta must be a number above 0 and below 1, not '2'"),
        (["--epsilon", "1", "--delta", "nan"], ConfigError, "--delta must be .* not 'nan'"),
        (["--epsilon", "1", "--steps", "0"], ConfigError, "--steps must be a whole number of at least 1 .* not '0'"),
        (["--noise-multiplier", "1", "--steps", "0"], ConfigError, "--steps must be .* not '0'"),
        (["--noise-multiplier", "1", "--steps", "1.5"], ConfigError, "--steps must be .* not '1.5'"),
        (["--noise-multiplier", "1", "--steps", "1e18"], ConfigError, "--steps must be .* not '1e18'"),
        (["--noise-multiplier", "-1"], ConfigError, "--noise-multiplier must be a number of at least 0 .* not '-1'"),
        (["--noise-multiplier", "1e200"], ConfigError, "--noise-multiplier must be .* not '1e200'"),
        (["--noise-multiplier", "1", "--sampling-rate", "3"], ConfigError, "--sampling-rate must be .* not '3'"),
        (["--noise-multiplier", "1", "--sampling-rate", "1e-200"], ConfigError, "--sampling-rate must be .* '1e-200'"),
        (["--epsilon", "1e-6"], BudgetError, "Raise epsilon"),
    ],
)
def test_bad_values(arguments, error, message):
    with pytest.raises(error, match=message):
        parse(cli.COMMANDS, ["account", *PLAN, *arguments]).run()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-1e-3"])
@pytest.mark.parametrize("option", ["--epsilon", "--noise-multiplier", "--delta", "--sampling-rate", "--steps"])
def test_values_that_are_no_quantity_get_one_line_and_status_2(option, value, capsys):
    plans = [[]] if option in ("--epsilon", "--noise-multiplier") else [["--epsilon", "1"], ["--noise-multiplier", "1"]]
    for plan in plans:
        assert cli.main(["account", *PLAN, *plan, option, value]) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1
        assert output.err.startswith(f"tff-pdp account: {option} must be a ")
        assert output.err.endswith(f", not {value!r}\n")


@pytest.mark.parametrize("noise", ["1e-200", "1e-6", "9e-4"])
def test_next_to_no_noise_is_no_protection(noise, capsys):
    assert run("--noise-multiplier", noise, "--json") == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] is None
    assert run("--noise-multiplier", noise) == 0
    assert "epsilon is infinite" in capsys.readouterr().out


def test_noise_and_epsilon_exclude_each_other():
    for arguments in ([], ["--epsilon", "1", "--noise-multiplier", "1"]):
        assert run(*arguments) == 2


def test_tensorflow_is_not_loaded():
    code = (
        "import sys, tff_pdp.commands.account, tff_pdp.privacy.accounting.ledger, tff_pdp.privacy.accounting.budgets\n"
        "assert 'tensorflow' not in sys.modules and 'tensorflow_federated' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ROWS = ["--rows-per-unit", "20", "--steps", "10196", "--delta", "3.8314e-7"]


def run_rows(unit, *arguments):
    return cli.main(["account", "--unit", unit, *ROWS, *arguments])


def test_rows_of_a_contact_graph_in_batches_of_fixed_size(capsys):
    batches = ["--num-rows", "2609976", "--batch-size", "512"]
    run_rows("node", *batches, "--noise-multiplier", "4.5", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] == result["epsilon_rdp"] == as_printed("20.7")
    assert result["epsilon_pld"] is result["sampling_rate"] is None
    assert (result["rows_per_unit"], result["num_rows"], result["batch_size"]) == (20, 2609976, 512)
    run_rows("node", *batches, "--epsilon", "20.7")
    text = capsys.readouterr().out
    assert "batches of 512 of 2609976 rows, noise multiplier 4.5" in text
    assert "one person of a silo's contact graph" in text and "at most 20 rows differ" in text


def test_rows_of_a_contact_graph_in_poisson_batches(capsys):
    sampling = ["--sampling-rate", "0.01"]
    run_rows("edge", *sampling, "--epsilon", "8", "--json")
    result = json.loads(capsys.readouterr().out)
    assert 8 * (1 - 3 * CALIBRATED) < result["epsilon"] <= result["epsilon_target"] == 8
    noise = ["--noise-multiplier", str(result["noise_multiplier"])]
    # No more rows differ than there are.
    run_rows("edge", *sampling, *noise, "--num-rows", "5", "--json")
    fewer = json.loads(capsys.readouterr().out)["epsilon"]
    assert fewer < result["epsilon"] / 2
    run_rows("edge", *sampling, *noise, "--rows-per-unit", "5")
    text = capsys.readouterr().out
    assert f"epsilon <= {fewer:.3f}" in text and "people's own features and states are not protected" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--unit", "node", "--sampling-rate", "0.1"], "--unit node needs --rows-per-unit"),
        (
            ["--unit", "node", "--rows-per-unit", "0", "--sampling-rate", "0.1"],
            "--rows-per-unit must be a whole number",
        ),
        (
            ["--unit", "node", "--rows-per-unit", "1.5", "--sampling-rate", "0.1"],
            "--rows-per-unit must be a whole number",
        ),
        (["--unit", "edge", "--rows-per-unit", "2", "--batch-size", "8"], "--batch-size needs --num-rows"),
        (["--unit", "edge", "--rows-per-unit", "2", "--batch-size", "8", "--num-rows", "7"], "--batch-size is 8"),
        (
            ["--unit", "edge", "--rows-per-unit", "2", "--sampling-rate", "0.1", "--num-rows", "nan"],
            "--num-rows must be a whole number",
        ),
        (["--unit", "user", "--rows-per-unit", "2", "--sampling-rate", "0.1"], "--rows-per-unit is for --unit node"),
        (["--unit", "silo_example", "--batch-size", "2"], "--batch-size is for --unit node and edge"),
    ],
)
def test_settings_of_rows_that_do_not_go_together(arguments, message, capsys):
    plan = ["--noise-multiplier", "1", "--steps", "10", "--delta", "1e-5"]
    assert cli.main(["account", *arguments, *plan]) == 2
    assert message in capsys.readouterr().err
