"""Rooms stay small, and each says what it is.

A room is a folder of the product, of the benchmarks or of the tools with Python files in it.
"""

import ast
from pathlib import Path

import pytest

from tests.places import ROOT

MODULES_OF_A_ROOM, MODULES = 14, 402
# Their `__init__` does something besides: it sets up what is imported later, or names what those outside import.
WITH_CODE = {"tff_pdp", "tff_pdp/testing", "tff_pdp/models", "beam_pipelines"}
# They hold programs, which nothing imports.
PROGRAMS = {"tools/bazel", "tools/flink"}


def _rooms() -> dict[str, list[Path]]:
    """Returns the modules of each room, by its path."""
    rooms: dict[str, list[Path]] = {}
    for top in ("tff_pdp", "beam_pipelines", "serving", "benchmarks", "tools"):
        for file in (ROOT / top).rglob("*.py"):
            rooms.setdefault(file.parent.relative_to(ROOT).as_posix(), []).append(file)
    return {room: [file for file in files if file.name != "__init__.py"] for room, files in sorted(rooms.items())}


ROOMS = _rooms()


def test_a_room_has_at_most_fourteen_modules() -> None:
    assert {room: len(files) for room, files in ROOMS.items() if len(files) > MODULES_OF_A_ROOM} == {}


def test_there_are_few_enough_modules() -> None:
    assert sum(map(len, ROOMS.values())) <= MODULES


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in PROGRAMS])
def test_a_room_says_its_modules_in_reading_order(room: str) -> None:
    tree = ast.parse((ROOT / room / "__init__.py").read_text())
    text = ast.get_docstring(tree)
    assert text
    assert len(tree.body) == 1 or room in WITH_CODE
    # That of tff_pdp begins with how the package is used as a library.
    first, _, order = text.rpartition("\n\n")
    assert first.endswith(".")
    assert "\n\n" not in first or room == "tff_pdp"
    listed = [line.partition(":")[0] for line in order.splitlines()]
    inner = [other.rpartition("/")[2] for other in ROOMS if other.rpartition("/")[0] == room]
    assert sorted(listed) == sorted([file.stem for file in ROOMS[room]] + inner)
