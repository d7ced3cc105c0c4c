"""Commands made of settings classes: what is written becomes typed fields, and what cannot is one line."""

import dataclasses
import gc
import importlib
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from msgspec import Meta

from tests.unrun import parse
from tff_pdp.command_line import Command, Option, Outcome, Positional, Reporting, Table, loading, main
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import Count, Finite, Fraction, Settings

COLOURS = ("red", "green")


class Promise(Settings, tag_field="kind", tag="promise"):
    """Promises.

    Attributes:
      most: how many.
    """

    most: Count


class Nothing(Settings, tag_field="kind", tag="nothing"):
    """Promises nothing."""


class Engine(Settings):
    """Computes.

    Attributes:
      engine: of the same name as the field that brings these.
      device: where.
      seed: of all draws.
    """

    engine: str = "own"
    device: Literal["cpu", "gpu"] = "cpu"
    seed: int = 3

    def __post_init__(self):
        if self.device == "gpu" and self.seed < 0:
            raise ValueError("a gpu has no seed below 0")


@dataclasses.dataclass(frozen=True)
class Job:
    """Runs.

    Attributes:
      output: folder to write.
      seed: of the job.
      flags: of others.
    """

    output: Path
    seed: int = 5
    flags: tuple[str, ...] = ()

    def __post_init__(self):
        if self.seed == 13:
            raise DataError("13 brings no luck")


class Work(Reporting):
    """Do the work.

    All of `%(prog)s`, at 100 % of speed.

    Attributes:
      paths: files to work on.
      output: where it goes, in a word of the command's own.
      shape: sizes `[height, width]`.
      label: names, one by one.
      grid: may be empty.
      merged: whether parts are merged.
    """

    paths: Annotated[tuple[Path, ...], Positional("FILE")]
    engine: Engine
    job: Job
    share: Fraction | None = None
    shape: Annotated[tuple[Count, ...], Meta(min_length=2, max_length=2)] = (28, 28)
    label: Annotated[tuple[str, ...], Option("NAME=N", each=True)] = ()
    grid: tuple[Finite, ...] | None = None
    merged: bool = True
    quick: bool = False
    slow: bool = False
    colour: Annotated[str, Option(choices=f"{__name__}:COLOURS")] = "red"
    bound: Promise | Nothing

    at_most_one = (("quick", "slow"),)
    fixed: ClassVar = {"flags": ("fixed",)}

    def run(self) -> Outcome:
        """Does it."""
        if self.quick:
            raise KeyboardInterrupt
        return Outcome(f"worked on {len(self.paths)}", {"files": len(self.paths)}, 3)


class Pass(Command):
    """Pass on what is not known."""

    job: Job
    rest: ClassVar[str] = "flags"
    separator: ClassVar[str] = "_"
    max_size: int = 1


TABLE = Table(
    "tool",
    "Does everything.",
    {"work": f"{__name__}:Work", "more": Table("other", "Has more.\nMuch.", {"pass": f"{__name__}:Pass"})},
    version="tool 1.0",
)
LEAST = ("work", "a", "b", "--output", "out", "--bound", "nothing")


def work(*words):
    return parse(TABLE, [*LEAST, *words])


def test_words_become_typed_fields():
    found = work()
    assert found.paths == (Path("a"), Path("b")) and found.share is None and found.grid is None and found.merged
    # The first class that has a name decides on its option, for all.
    assert (found.engine, found.job) == (Engine(), Job(Path("out"), 3, ("fixed",)))
    assert found.bound == Nothing()
    found = work(
        "--share",
        "1e-1",
        "--shape",
        "2",
        "3",
        "--no-merged",
        "--device=gpu",
        "--engine",
        "e",
        "--seed",
        "7e0",
        "--grid",
    )
    assert (found.share, found.shape, found.merged, found.grid) == (0.1, (2, 3), False, ())
    assert (found.engine, found.job.seed) == (Engine(engine="e", device="gpu", seed=7), 7)


def test_values_that_are_repeated():
    assert parse(TABLE, ["work", "--label", "x=1", "--label", "y=2", *LEAST[1:]]).label == ("x=1", "y=2")
    assert work("--grid", "-1e-3", "2", "--grid", "-5").grid == (-0.001, 2.0, -5.0)


def test_a_union_of_classes_is_chosen_among():
    assert work("--bound", "promise", "--most", "4").bound == Promise(most=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND; see tool --help"),
        (["wrok"], "unknown command 'wrok'; did you mean work?; see tool --help"),
        (["more", "pas"], "unknown command 'pas'; did you mean pass?; see tool more --help"),
        (["work"], "the following arguments are required: FILE, --bound, --output; see tool work --help"),
        ([*LEAST, "--shapes", "1"], "unknown option --shapes; did you mean --shape?; see tool work --help"),
        ([*LEAST, "--zzz=1"], "unknown option --zzz; known: --bound, --colour, "),
        ([*LEAST, "-q"], "unexpected argument '-q'; see tool work --help"),
        ([*LEAST, "--share", "1.5"], "--share must be a number of at least 0 and at most 1, not '1.5'"),
        ([*LEAST, "--share", "nan"], "--share must be a number of at least 0 and at most 1, not 'nan'"),
        ([*LEAST, "--share", "-inf"], "--share must be a number of at least 0 and at most 1, not '-inf'"),
        ([*LEAST, "--seed", "x"], "--seed must be a whole number, not 'x'"),
        ([*LEAST, "--shape", "1"], "--shape must be a list of 2, each a whole number of at least 1, not '1'"),
        ([*LEAST, "--device", "tpu"], "--device must be one of cpu, gpu, not 'tpu'"),
        ([*LEAST, "--colour", "grene"], "unknown --colour 'grene'; did you mean green?"),
        ([*LEAST, "--bound", "promise"], "bound: missing key most: a whole number of at least 1"),
        ([*LEAST, "--most", "3"], "bound: unknown key most; known: none"),
        ([*LEAST, "--quick", "--slow"], "argument --slow: not allowed with argument --quick; see tool work --help"),
        ([*LEAST, "--device", "gpu", "--seed=-1"], "a gpu has no seed below 0"),
        ([*LEAST, "--seed", "13"], "13 brings no luck"),
        ([*LEAST, "--flags", "x"], "unknown option --flags; "),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(words, message, capsys):
    assert main(TABLE, words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.partition(": ")[2].startswith(message)
    with pytest.raises((ConfigError, DataError)):
        parse(TABLE, words)


def test_what_was_found_is_printed(capsys):
    assert main(TABLE, LEAST) == 3
    assert capsys.readouterr().out == "worked on 2\n"
    assert main(TABLE, [*LEAST, "--json"]) == 3
    assert capsys.readouterr().out == '{"files": 2}\n'
    assert main(TABLE, [*LEAST, "--quick"]) == 130
    assert capsys.readouterr().err == "tool work: stopped\n"


def test_flags_for_others_are_passed_on_but_slips_are_not():
    found = parse(TABLE, ["more", "pass", "--output", "o", "--max_size", "2", "--other=1", "--workers", "3"])
    assert (found.max_size, found.job.flags) == (2, ("--other=1", "--workers", "3"))
    with pytest.raises(ConfigError, match="unknown option --max_sizes; did you mean --max_size"):
        parse(TABLE, ["more", "pass", "--output", "o", "--max_sizes", "2"])
    # Those are no beginnings of ours.
    assert parse(TABLE, ["more", "pass", "--output", "o", "--max", "2"]).job.flags == ("--max", "2")


def shown(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(TABLE, words)
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_is_made_of_docstrings(capsys):
    text = shown(capsys, "work", "--help")
    for part in (
        "usage: tool work [-h]",
        "Do the work. All of `tool work`, at 100 % of speed. positional arguments: FILE files to work on",
        "--output PATH where it goes, in a word of the command's own",
        "--device {cpu,gpu} where; default cpu",
        "--seed N of all draws; default 3",
        "--shape N [N ...] sizes [height, width]; default 28 28",
        "--label NAME=N names, one by one",
        "--grid [X ...] may be empty",
        "--no-merged switch off: whether parts are merged",
        "--colour {red,green}",
        "--bound {nothing,promise}",
        "--most N how many",
    ):
        assert part in text
    assert "--flags" not in text
    assert "flags that are not listed here: of others" in shown(capsys, "more", "pass", "--help")


def test_the_overview_names_commands_and_version(capsys):
    assert "Does everything. commands: work Do the work. more Has more. options:" in shown(capsys, "--help")
    assert "usage: tool more [-h]" in shown(capsys, "more", "-h")
    assert shown(capsys, "--version") == "tool 1.0"


def test_modules_are_loaded_without_garbage_collection_and_left_out_of_it_later(tmp_path, monkeypatch):
    (tmp_path / "module_that_looks.py").write_text(
        "import gc\nWAS_ENABLED = gc.isenabled()\nKEPT = [[] for _ in range(100)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert gc.isenabled()
    before = gc.get_freeze_count()
    try:
        with loading():
            module = importlib.import_module("module_that_looks")
        assert not module.WAS_ENABLED and gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen >= before + 100
        assert not any(one is module.KEPT for one in gc.get_objects())
        # A command that runs again in this process must not keep the garbage of the first time.
        made_since = [[] for _ in range(100)]
        with loading():
            importlib.import_module("module_that_looks")
        assert gc.get_freeze_count() <= frozen and len(made_since) == 100
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_as_it_was():
    with pytest.raises(ModuleNotFoundError), loading():
        importlib.import_module("no_such_module")
    assert gc.isenabled()
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
