import ast
import re
import subprocess
import sys

import pytest

from beam_pipelines.__main__ import JOBS
from serving.__main__ import COMMANDS as SERVING
from tff_pdp.cli import COMMANDS, main
from tff_pdp.command_line import Table

HEAVY = {"tensorflow", "tensorflow_federated", "apache_beam", "matplotlib", "scipy", "dp_accounting"}


def names(table, *before):
    """The words of every command of a table and of those in it."""
    for name, entry in table.commands.items():
        yield from names(entry, *before, name) if isinstance(entry, Table) else [(*before, name)]


def imported_for_help(commands):
    """The modules that `tff-pdp COMMAND --help` of all of these import, in a process of their own."""
    code = f"""if True:
        import sys
        from tff_pdp.cli import main
        for words in {commands!r}:
            try:
                main([*words, "--help"])
            except SystemExit as stop:
                assert stop.code == 0
        print(sorted(sys.modules), file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(ast.literal_eval(done.stderr)), done.stdout


def test_help_imports_nothing_heavy():
    imported, text = imported_for_help([()])
    assert not imported & {*HEAVY, "numpy"}
    assert all(f"\n  {name} " in text for name in COMMANDS.commands)
    imported, text = imported_for_help(list(names(COMMANDS)))
    assert not imported & HEAVY and "numpy" in imported
    assert text.count("usage: ") == len(list(names(COMMANDS)))


@pytest.mark.parametrize("command", names(COMMANDS), ids=" ".join)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: tff-pdp {' '.join(command)} [-h]")
    options = re.findall(r"^  (-\S+)[^\n]*?(?:  +|\n +)(\S)", text, re.MULTILINE)
    assert all(meaning.isalnum() or meaning in "<*" for _, meaning in options), options


@pytest.mark.parametrize(("door", "table"), [((), SERVING), (("job",), JOBS)])
def test_other_doors_lead_to_the_same_commands(door, table):
    own = COMMANDS.commands
    for word in door:
        own = own[word].commands
    renamed = {"verify": "verify-export"} if table is SERVING else {}
    assert {name: own[renamed.get(name, name)] for name in table.commands} == table.commands


def test_a_user_error_is_one_line_and_status_two(capsys, tmp_path):
    assert main(["train", "--config", str(tmp_path / "absent.yaml")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "absent.yaml" in captured.err


def test_set_needs_a_value(capsys):
    assert main(["train", "--config", "demo", "--set", "training.rounds"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
