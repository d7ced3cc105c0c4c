import subprocess
import sys
import time

import pytest

from tff_pdp.cli import main

COMMANDS = ("prepare", "train", "tune", "evaluate", "account", "export", "personalize", "verify", "seal")
COMMANDS += ("serve", "predict", "demo")


def test_importing_the_command_line_imports_nothing_heavy():
    code = (
        "import sys, tff_pdp.cli as cli; cli.build_parser();"
        "print([name for name in ('tensorflow', 'tensorflow_federated', 'apache_beam', 'matplotlib', 'scipy')"
        " if name in sys.modules])"
    )
    started = time.process_time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert not done.stderr
    assert time.process_time() - started < 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_a_user_error_is_one_line_and_status_two(capsys, tmp_path):
    assert main(["train", "--config", str(tmp_path / "absent.yaml")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "absent.yaml" in captured.err


def test_set_needs_a_value(capsys):
    assert main(["train", "--config", "demo", "--set", "training.rounds"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
