"""Compares the pinned packages with known vulnerabilities, a list kept by hand in `tools/audit_deps.toml`.

    make audit-deps

The exit status is 1 if a pin is affected and the list gives no reason why it does no harm, if a source has code that
the list says is absent, or if a package of the list is no longer pinned.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
LOCKS = (
    ROOT / "tff_pdp" / "requirements.txt",
    ROOT / "requirements-dev.txt",
    ROOT / "tff_pdp" / "requirements-gpu.txt",
    ROOT / "tff_pdp" / "requirements-mlflow.txt",
)
PACKAGES = ("tff_pdp", "beam_pipelines", "serving")


def main() -> int:
    """Prints a line for each vulnerability, and the date of the last look at the list."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    looked_at = content.pop("looked_at")
    sources = [file.read_text() for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    problems = 0
    for is_well, line in findings(content, read_pins(*(lock.read_text() for lock in LOCKS)), sources):
        problems += not is_well
        print(line if is_well else f"PROBLEM: {line}")
    print(f"{problems} problems; the list, which is not complete, was last looked at on {looked_at}")
    return min(problems, 1)


def read_pins(*locks: str) -> dict[str, str]:
    """Returns the pinned versions by package; each argument is the text of a lock file."""
    return dict(pin for lock in locks for pin in re.findall(r"^([a-z0-9-]+)==([^\s;]+)", lock, re.MULTILINE))


def findings(known: Mapping[str, Any], pins: Mapping[str, str], sources: list[str]) -> Iterator[tuple[bool, str]]:
    """Yields, for each known vulnerability, whether all is well, and a sentence that says why."""
    for package, entry in known.items():
        if package not in pins:
            yield False, f"{package} is not pinned: remove it from the list"
            continue
        for one in entry["known"]:
            about = f"{package} {pins[package]}: {one['id']}"
            ranges = one["affected"] if isinstance(one["affected"], list) else [one["affected"]]
            if not any(SpecifierSet(versions).contains(pins[package], prereleases=True) for versions in ranges):
                yield True, f"{about} is of {' or '.join(ranges)}"
            elif "done" not in one:
                yield False, f"{about} ({one['what']}): affected, and the list has no entry `done` for it"
            elif "absent" in one and any(re.search(one["absent"], source) for source in sources):
                yield False, f"{about} ({one['what']}): affected, and a source has {one['absent']}"
            else:
                yield True, f"{about} ({one['what']}): affected, but {one['done']}"


if __name__ == "__main__":
    sys.exit(main())
