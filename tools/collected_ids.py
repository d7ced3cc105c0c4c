"""Lists lost tests: ids in an old list of tests that are not in the new list and have no replacement.

    .venv/bin/python -m pytest --collect-only -q -m "" > new.txt
    .venv/bin/python tools/collected_ids.py old.txt new.txt --moves moves.tsv --replaced replaced.tsv

Either list may also be a checkout; this Python then collects its tests. A line of the moves has the old and the new
path of a file, separated by a tab. A line of the replacements has an old id, or the beginning of several ids with a `*`
at the end; after a tab follow the new ids that replace it, separated by ` | `, or `-` and a reason. The new ids must
exist.
"""

import argparse
import subprocess
import sys
from pathlib import Path


def ids_of(source: Path) -> list[str]:
    """Reads the ids of tests in a file, or collects the tests of a checkout."""
    if source.is_dir():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"]
        text = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True).stdout
    else:
        text = source.read_text()
    return [line for line in text.splitlines() if "::" in line.partition(" ")[0]]


def moved(test: str, moves: dict[str, str]) -> str:
    """Returns the id of a test after its file was moved."""
    path, _, name = test.partition("::")
    new = moves.get(path, path)
    module, new_module = (text.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for text in (path, new))
    # Doctests are named after their module.
    if name == module or name.startswith(module + "."):
        name = new_module + name[len(module) :]
    return f"{new}::{name}"


def find_lost(old: list[str], new: list[str], moves: dict[str, str], replaced: dict[str, str]) -> list[str]:
    """Returns the old ids that are not in the new list, moved or not, and that nothing replaces."""
    present, starts = set(new), {key[:-1]: value for key, value in replaced.items() if key.endswith("*")}

    def stands(test: str) -> bool:
        if moved(test, moves) in present:
            return True
        values = [value for start, value in starts.items() if test.startswith(start)]
        by = replaced.get(test) or next(iter(values), "")
        if by.startswith("-"):
            return by.strip("- ") != ""
        return bool(by) and all(name in present for name in by.split(" | "))

    return [test for test in old if not stands(test)]


def read_table(path: Path | None) -> dict[str, str]:
    """Reads two columns, separated by a tab."""
    lines = path.read_text().splitlines() if path else []
    return dict(line.split("\t", 1) for line in lines if "\t" in line)


def main() -> int:
    """Prints the lost tests; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--moves", type=Path)
    parser.add_argument("--replaced", type=Path)
    options = parser.parse_args()
    old, new = ids_of(options.old), ids_of(options.new)
    moves, replaced = read_table(options.moves), read_table(options.replaced)
    lost = find_lost(old, new, moves, replaced)
    print("\n".join([*lost, f"{len(old)} tests before, {len(new)} now, {len(lost)} lost"]))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
