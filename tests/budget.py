"""A pytest plugin: CPU seconds of the tests by folder, beside their budget, and groups for pytest-xdist.

`tests/budget.toml` has the budgets. Seconds of a CPU differ between machines, so a run measures how long a fixed piece
of work takes, and states each figure as it would be on the machine where the budgets were written.

`--dist loadgroup` gives a group of tests to one worker: a file, the doctests of a package, or an algorithm of the
contract. The heaviest begin, so that both workers are busy to the end.
"""

import ast
import os
import statistics
import sys
import time
import tomllib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests import tiers

FILE = Path(__file__).with_name("budget.toml")
TIERS = {"not all and not hurt": "test", "not hurt": "all", "hurt": "hurt"}
START = "start and collection"
# A folder may spend this share of its budget, and a small one these seconds more: on a machine that others share, the
# same tests take up to a quarter more from one run to the next, and a new file in a small folder is no fault.
TOLERANCE, SMALL_SECONDS = 1.5, 15.0
# Groups below are not worth a line in the file; they come last.
HEAVY_SECONDS = 4.0
# How often the fixed piece of work is timed; other programs on the machine slow it down as they do the tests.
REFERENCE_EVERY = 60.0


def pytest_addoption(parser):
    """Adds the options of budgets."""
    group = parser.getgroup("budget", "CPU seconds of tests")
    group.addoption(
        "--budget",
        choices=["print", "enforce", "write"],
        default="print",
        help="at the end of a whole run: print CPU seconds by folder, fail where they exceed the budget, or write it",
    )
    group.addoption("--cpu-of-tests", metavar="FILE", help="write the CPU seconds of each test, heaviest first")


def pytest_configure(config):
    """Begins to count, and settles the tier."""
    tiers.begin(config.getoption("markexpr"))
    config.pluginmanager.register(_Count(config), "budget_count")


def group_of(item) -> str:
    """Name the tests that belong in one worker, as they share what is slow to build: a file or, of the contract, an
    algorithm."""
    path = item.nodeid.partition("::")[0]
    if isinstance(item, pytest.DoctestItem):
        return f"doctests of {path.partition('/')[0]}"
    if path.startswith("tests/workers/"):
        # Workers of one cluster take most of a minute to start.
        return "tests/workers/"
    if path.startswith("tests/contract/") and hasattr(item, "callspec"):
        algorithm = item.callspec.params.get("built", item.callspec.params.get("name"))
        if isinstance(algorithm, str):
            return f"tests/contract/ {algorithm}"
    return path


def folder_of(group: str) -> str:
    """Name the folder in whose budget a group is."""
    return "/".join(group.split("/")[:2]) if group.startswith("tests/") else group


def reference_seconds() -> float:
    """Time a fixed piece of work of the kind that tests do most: Python objects.

    Not arrays: a processor with wider vectors sorts them in a seventh of the time, and traces graphs no faster.
    """
    source = "def f(x):\n    return [g(x, y=i) for i in range(x) if i % 3]\n" * 300
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        compile(ast.parse(source), "reference", "exec")
        seconds.append(time.thread_time() - start)
    return min(seconds)


def summary(tier: str | None, budget: dict, reference: float, groups: dict[str, float]) -> tuple[list[str], list[str]]:
    """Return lines on what was spent by folder, and the folders that spent too much.

    Args:
      tier: "test", "all" or "hurt"; None for a run that has no budget.
      budget: What the file says.
      reference: Seconds of the fixed piece of work in this run.
      groups: CPU seconds by group.
    """
    speed = budget.get("reference", reference) / reference
    spent: dict[str, float] = defaultdict(float)
    for group, seconds in groups.items():
        spent[folder_of(group)] += seconds * speed
    allowed = budget.get(tier, {})
    lines, beyond = [f"{'folder':40}{'spent':>8}{'budget':>8}"], []
    for folder, seconds in sorted(spent.items(), key=lambda pair: -pair[1]):
        if folder in allowed and seconds > max(TOLERANCE * allowed[folder], allowed[folder] + SMALL_SECONDS):
            beyond.append(folder)
        mark = "  more than its budget" if folder in beyond else ""
        lines.append(f"{folder:40}{seconds:8.0f}{allowed.get(folder, '-'):>8}{mark}")
    lines.append(
        f"{'together':40}{sum(spent.values()):8.0f}{sum(allowed.get(folder, 0) for folder in spent) or '-':>8}"
    )
    lines.append(f"(as on the machine of the budgets; seconds of this one are {1 / speed:.2f} of its)")
    return lines, beyond


def written(tier: str, budget: dict, reference: float, groups: dict[str, float], whole: bool = True) -> str:
    """Return the text of the file with the budgets of this run; other tiers' stay, as do those of what was not run."""
    speed = budget.get("reference", reference) / reference
    scaled = {group: seconds * speed for group, seconds in groups.items()}
    folders: dict[str, float] = defaultdict(float)
    for group, seconds in scaled.items():
        folders[folder_of(group)] += seconds
    known = {group: round(seconds, 1) for group, seconds in scaled.items() if group != START}
    heavy = {**budget.get("groups", {}), **known}
    tables = {name: dict(budget.get(name, {})) for name in TIERS.values()}
    kept = {} if whole else tables[tier]
    tables[tier] = {**kept, **{folder: int(np.ceil(seconds)) for folder, seconds in folders.items()}}
    tables["groups"] = {group: seconds for group, seconds in heavy.items() if seconds >= HEAVY_SECONDS}
    lines = [
        "# CPU seconds of the tests, written by `pytest --budget=write`; see docs/testing.md.",
        "# The time of the fixed piece of work on the machine where they were measured.",
        f"reference = {budget.get('reference', round(reference, 4))}",
    ]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f'"{key}" = {table[key]}' for key in sorted(table, key=lambda key: -table[key]))]
    return "\n".join(lines) + "\n"


def _read() -> dict:
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


class _Count:
    def __init__(self, config):
        self._config = config
        self._references: list[float] = []
        self._next_reference = 0.0
        self._groups: dict[str, float] = defaultdict(float)
        self._tests: dict[str, float] = {}
        self._current, self._before = START, 0.0
        self._lines: list[str] = []
        self._failed: list[str] = []

    def pytest_collection_modifyitems(self, items):
        if not hasattr(self._config, "workerinput"):
            return
        seconds = _read().get("groups", {})
        for item in items:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
        items.sort(key=lambda item: (-seconds.get(group_of(item), 0.0), group_of(item)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if group_of(item) != self._current:
            self._close_group(group_of(item))
        before = _seconds_of_finished()
        result = yield
        self._tests[item.nodeid.partition("@")[0]] = _seconds_of_finished() - before
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        # A worker that was killed has nothing to tell.
        self._add(**getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_sessionfinish(self, session):
        if not self._config.getoption("numprocesses", None):
            self._close_group("")
        if hasattr(self._config, "workeroutput"):
            parts = {"references": self._references, "groups": dict(self._groups), "tests": self._tests}
            self._config.workeroutput["cpu_seconds"] = parts
        else:
            self._report(session)

    def pytest_terminal_summary(self, terminalreporter):
        if self._lines:
            terminalreporter.section("CPU seconds")
            terminalreporter.write_line("\n".join(self._lines))

    def _add(self, references=(), groups=(), tests=()):
        self._references.extend(references)
        self._tests.update(tests)
        for group, seconds in dict(groups).items():
            self._groups[group] += seconds

    def _close_group(self, following):
        now = _seconds_of_tree()
        self._groups[self._current] += max(now - self._before, 0.0)
        if time.monotonic() >= self._next_reference:
            self._references.append(reference_seconds())
            self._next_reference = time.monotonic() + REFERENCE_EVERY
            now = _seconds_of_tree()
        self._current, self._before = following, now

    def _report(self, session):
        if path := self._config.getoption("cpu_of_tests"):
            rows = sorted(self._tests.items(), key=lambda pair: -pair[1])
            Path(path).write_text("".join(f"{seconds:.3f}\t{test}\n" for test, seconds in rows))
        whole = self._config.args_source is pytest.Config.ArgsSource.TESTPATHS
        tier = TIERS.get(self._config.getoption("markexpr"))
        mode = self._config.getoption("budget")
        if not (whole and tier and self._tests) and mode == "print":
            return
        budget, reference = _read(), statistics.median(self._references)
        self._lines, beyond = summary(tier, budget, reference, self._groups)
        if mode == "write" and tier:
            FILE.write_text(written(tier, budget, reference, self._groups, whole))
        if mode == "enforce" and beyond and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus, self._failed = pytest.ExitCode.TESTS_FAILED, beyond

    def pytest_unconfigure(self):
        # The last lines of a log have to say why a run failed whose tests all passed.
        if self._failed:
            print(f"more CPU seconds than {FILE.name} allows: {', '.join(self._failed)}", file=sys.stderr)


def _seconds_of_finished() -> float:
    """CPU seconds of this process and of children that have ended; those that run on count with their group."""
    return sum(os.times()[:4])


def _seconds_of_tree() -> float:
    """CPU seconds of this process and of all that it started, directly or not."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may have blanks and parentheses itself.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
    pending, total = [*children[os.getpid()]], 0
    while pending:
        pid = pending.pop()
        total += ticks[pid]
        pending += children[pid]
    return _seconds_of_finished() + total / os.sysconf("SC_CLK_TCK")
