"""Reads the tables of docs/tff_conformance.md: test files, and the tests that are known to fail on the engine."""

import dataclasses
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tff_conformance.md"
CLASSES = ("fault", "refused by design", "artefact")


@dataclasses.dataclass(frozen=True)
class KnownFailure:
    """A test of TFF that fails on the in-process engine, and passes on TFF's own context.

    Attributes:
      file: path of the test file, relative to the folder `tensorflow_federated`.
      test: class and method, such as `SumTest.test_empty`.
      kind: one of `CLASSES`.
      as_numpy: whether the test also fails where the engine's results are converted to NumPy arrays and lists.
      reason: why the test fails, in one line.
    """

    file: str
    test: str
    kind: str
    as_numpy: bool
    reason: str


def known_files(page: str) -> dict[str, int]:
    """Returns the test files of the page, each with its number of tests."""
    return {file: int(tests) for file, tests, *_ in _rows(page, "test file", "tests")}


def known_failures(page: str) -> list[KnownFailure]:
    """Returns the failures that the page lists.

    Raises:
      ValueError: a row names no known class, or says neither `passes` nor `fails`.
    """
    failures = []
    for file, test, kind, as_numpy, reason in _rows(page, "test file", "test"):
        if kind not in CLASSES:
            raise ValueError(f"{test}: {kind!r} is no class; the classes are {', '.join(CLASSES)}")
        if as_numpy not in ("passes", "fails"):
            raise ValueError(f"{test}: {as_numpy!r} is neither 'passes' nor 'fails'")
        failures.append(KnownFailure(file, test, kind, as_numpy == "fails", reason))
    return failures


def _rows(page: str, *header: str) -> list[list[str]]:
    """Returns the rows of the table whose header begins with these cells."""
    rows, inside = [], False
    for line in page.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if tuple(cells[: len(header)]) == header:
            inside = True
        elif not cells:
            inside = False
        elif inside and set(cells[0]) != {"-"}:
            rows.append(cells)
    return rows
