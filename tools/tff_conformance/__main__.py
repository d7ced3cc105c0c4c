"""Runs TFF's own tests on the in-process engine, and prints the differences from docs/tff_conformance.md.

    git clone --branch v0.87.0 --depth 1 https://github.com/google-parfait/tensorflow-federated tff
    .venv/bin/python -m tools.tff_conformance tff

Each test file runs in a process of its own, one after another. The exit status is 1 if a test fails that the page does
not list, or a file ends without results. A listed test that passes is printed, and does not change the exit status.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.tff_conformance.known import PAGE, KnownFailure, known_failures, known_files

_PACKAGE = "tensorflow_federated"
_SECONDS_FOR_A_FILE = 1800
_ENGINES = {"tensors": "inprocess", "numpy": "inprocess-numpy"}


def main(arguments: list[str] | None = None) -> int:
    """Runs the test files, and prints a line for each file and a table of differences.

    Returns:
      The exit status: 1 after a failure that the page does not list, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.tff_conformance", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("source_tree", type=Path, help="checkout of TensorFlow Federated at the installed version")
    parser.add_argument(
        "--file", action="append", help=f"one test file, below {_PACKAGE}; default: all files of the page"
    )
    parser.add_argument(
        "--values",
        choices=[*_ENGINES],
        default="tensors",
        help="results as the engine returns them, or converted to NumPy arrays and lists; default: tensors",
    )
    parser.add_argument("--stock", action="store_true", help="run on TFF's own context, for comparison")
    options = parser.parse_args(arguments)
    tree = options.source_tree.resolve()
    if not (tree / _PACKAGE).is_dir():
        parser.error(f"{tree} has no folder {_PACKAGE}")
    page = PAGE.read_text()
    files = options.file or list(known_files(page))
    engine = "stock" if options.stock else _ENGINES[options.values]
    known = (
        [] if options.stock else [row for row in known_failures(page) if row.as_numpy or options.values == "tensors"]
    )
    found: dict[str, dict[str, str] | None] = {}
    for file in files:
        found[file] = run_file(tree, file, engine)
        print(f"{file}: {_counted(found[file])}", flush=True)
    new, gone = differences(found, known)
    for title, rows in (("fails, and is not listed", new), ("is listed, and passes", gone)):
        for file, test in rows:
            print(f"| {file} | {test} | {title} |")
    return 1 if new else 0


def run_file(tree: Path, file: str, engine: str) -> dict[str, str] | None:
    """Runs one test file in a process of its own.

    Returns:
      `passes`, `fails` or `is skipped` by test; None if the process ended without results.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "tools.tff_conformance.run_file", str(tree), f"{_PACKAGE}/{file}", engine]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, f"--xml_output_file={results}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
            try:
                process.wait(_SECONDS_FOR_A_FILE)
            except subprocess.TimeoutExpired:
                print(f"{file}: ended after {_SECONDS_FOR_A_FILE} seconds", file=sys.stderr)
            finally:
                # TFF's own workers may outlive the process that started them.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            outcomes = read_results(results.read_text()) if results.exists() else None
            if outcomes is None:
                log.seek(0)
                print(log.read()[-3000:], file=sys.stderr)
            return outcomes


def read_results(text: str) -> dict[str, str] | None:
    """Reads the file that absltest writes: the outcome by class and method; None if the file is not complete."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    outcomes = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('__main__.')}.{case.get('name')}"
        failed = case.find("failure") is not None or case.find("error") is not None
        outcomes[name] = "fails" if failed else "passes" if case.get("result") == "completed" else "is skipped"
    return outcomes


def differences(
    found: Mapping[str, Mapping[str, str] | None], known: Iterable[KnownFailure]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Compares outcomes with the known failures.

    Args:
      found: outcomes by file and test; None for a file without results.
      known: failures that are expected.

    Returns:
      File and test of each failure that is not known, and of each known failure that has passed.
    """
    expected = {(row.file, row.test) for row in known}
    outcomes = {(file, test): outcome for file, of_file in found.items() for test, outcome in (of_file or {}).items()}
    new = [(file, "(the file ended without results)") for file, of_file in found.items() if of_file is None]
    new += [key for key, outcome in outcomes.items() if outcome == "fails" and key not in expected]
    return new, [key for key in outcomes if outcomes[key] == "passes" and key in expected]


def _counted(outcomes: Mapping[str, str] | None) -> str:
    if outcomes is None:
        return "no results"
    counts = [
        f"{sum(own == outcome for own in outcomes.values())} {outcome}" for outcome in ("passes", "fails", "is skipped")
    ]
    return f"{len(outcomes)} tests: {', '.join(counts)}"


if __name__ == "__main__":
    sys.exit(main())
