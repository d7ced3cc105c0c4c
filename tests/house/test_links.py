"""No text of the repository names a place that is not there.

Checked are links and anchors of all Markdown, and, between backquotes, paths that begin with a folder of the
repository and dotted names that begin with one of its packages; of these also what docstrings and comments say. The
changelog may name places as they were; its links are checked.
"""

import glob
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.places import ROOT

FOLDERS = (".ci", "beam_pipelines", "benchmarks", "docs", "serving", "tests", "tff_pdp", "tools")
PACKAGES = ("beam_pipelines", "benchmarks", "serving", "tests", "tff_pdp")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_QUOTED = re.compile(r"`([^`\s]+)`")
_BRACES = re.compile(r"\{([^{}]*)\}")
_PLACEHOLDER = re.compile(r"<[^<>]*>")
_DOTTED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


def _texts(suffix: str) -> list[Path]:
    return [*ROOT.glob(f"*{suffix}"), *(file for top in FOLDERS for file in sorted((ROOT / top).rglob(f"*{suffix}")))]


def _names(files: list[Path]) -> list[str]:
    return [file.relative_to(ROOT).as_posix() for file in files]


MARKDOWN = _names(_texts(".md"))
SPEAKING_OF_TODAY = [name for name in MARKDOWN if name != "CHANGELOG.md"]


def _without_code(text: str) -> str:
    return re.sub(r"^(?:```.*?^```| {4}.*?$)", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> Iterator[str]:
    """Yields the anchors of headings as GitHub makes them."""
    seen: dict[str, int] = {}
    for heading in _HEADING.findall(_without_code(text)):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = seen[anchor] = seen.get(anchor, -1) + 1
        yield f"{anchor}-{number}" if number else anchor


def _dead_links(file: Path) -> Iterator[str]:
    for link in _LINK.findall(_without_code(file.read_text())):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if not target.exists() or (anchor and anchor not in _anchors(target.read_text())):
            yield link


def _dead_paths(text: str) -> Iterator[str]:
    for quoted in _QUOTED.findall(text):
        if "/" not in quoted or quoted.partition("/")[0] not in FOLDERS:
            continue
        choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(_BRACES.split(quoted))]
        paths = (_PLACEHOLDER.sub("*", "".join(parts)) for parts in itertools.product(*choices))
        if not all(glob.glob(path, root_dir=ROOT) for path in paths):
            yield quoted


def _dead_names(text: str) -> Iterator[str]:
    for quoted in _QUOTED.findall(text):
        if _DOTTED.fullmatch(quoted) and not _is_there(quoted.split(".")):
            yield quoted


def _is_there(parts: list[str]) -> bool:
    """Whether a dotted name is a module or a room, or what follows a module's name occurs in it."""
    for number in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:number])
        if path.is_dir():
            rest = parts[number:]
            return not rest or ((path / "__init__.py").is_file() and _has(path / "__init__.py", rest))
        if path.with_suffix(".py").is_file():
            return _has(path.with_suffix(".py"), parts[number:])
    return False


def _has(module: Path, names: list[str]) -> bool:
    text = module.read_text()
    return all(re.search(rf"\b{name}\b", text) for name in names)


@pytest.mark.parametrize("name", MARKDOWN)
def test_links_lead_somewhere(name: str) -> None:
    assert list(_dead_links(ROOT / name)) == []


@pytest.mark.parametrize("name", SPEAKING_OF_TODAY)
def test_places_named_in_texts_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    assert [*_dead_paths(text), *_dead_names(text)] == []


def test_places_named_in_code_are_there() -> None:
    dead = {name: [*_dead_paths(text), *_dead_names(text)] for name, text in _code().items()}
    assert {name: found for name, found in dead.items() if found} == {}


def _code() -> dict[str, str]:
    files = [*_texts(".py"), *_texts(".yaml"), *_texts("BUILD"), *_texts(".bzl"), ROOT / "Makefile"]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files if file != Path(__file__)}


def test_a_dead_place_is_found(tmp_path: Path) -> None:
    file = tmp_path / "text.md"
    file.write_text("# One: a `b`\n\n[a](#one-a-b) [b](#two) [c](text.md#one-a-b) [d](other.md) [e](https://a.b)\n")
    assert list(_dead_links(file)) == ["#two", "other.md"]
    assert list(_dead_paths("`docs/beam.md` `tff_pdp/{data,gone}/` `docs/<a>.md` `elsewhere/a` `tests/gone.py`")) == [
        "tff_pdp/{data,gone}/",
        "tests/gone.py",
    ]
    alive = "`tff_pdp.models` `tff_pdp.models.base.Model` `tff_pdp.__version__` `numpy.gone`"
    assert list(_dead_names(f"{alive} `tff_pdp.runtime.train` `tff_pdp.models.base.Gone`")) == [
        "tff_pdp.runtime.train",
        "tff_pdp.models.base.Gone",
    ]
