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


def imported_by_help(*words):
    """The modules that `tff-pdp WORDS --help` has imported in a process of its own, and what it printed."""
    code = f"""if True:
        import sys
        from tff_pdp.cli import main
        try:
            main([*{words!r}, "--help"])
        finally:
            print(sorted(sys.modules), file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(ast.literal_eval(done.stderr)), done.stdout


def test_help_imports_nothing_heavy():
    imported, text = imported_by_help()
    assert not imported & {*HEAVY, "numpy"}
    assert all(f"\n  {name} " in text for name in COMMANDS.commands)


@pytest.mark.parametrize("command", names(COMMANDS), ids=" ".join)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: tff-pdp {' '.join(command)} [-h]")
    options = re.findall(r"^  (-\S+)[^\n]*?(?:  +|\n +)(\S)", text, re.MULTILINE)
    assert all(meaning.isalnum() or meaning in "<*" for _, meaning in options), options


def test_no_command_needs_anything_heavy_to_explain_itself():
    code = """if True:
        import sys
        from tff_pdp.cli import COMMANDS, main
        from tests.commands.test_cli import names
        for words in names(COMMANDS):
            try:
                main([*words, "--help"])
            except SystemExit:
                print(words, sorted(sys.modules), file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    *_, last = done.stderr.splitlines()
    assert last.startswith("('doctor',)")
    assert not set(re.findall(r"'(\w+)'", last)) & HEAVY


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
