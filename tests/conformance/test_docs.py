"""The requests in docs/serving.md get the answers that are printed below them."""

import dataclasses
import json
import shlex
import urllib.parse
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


@dataclasses.dataclass(frozen=True)
class Example:
    """One `curl`: what it sends, and the answer below it, if there is one."""

    path: str
    body: str | None
    answer: str | None


def _examples() -> list[Example]:
    """Reads the indented blocks: a command goes on until its quotes are closed and no backslash ends it."""
    section = DOCS.read_text(encoding="utf-8").split("## Requests by curl")[1].split("\n## ")[0]
    lines = [line.removeprefix("    ") for line in section.splitlines() if line.startswith("    ")]
    examples = []
    for index, line in enumerate(lines):
        if not line.startswith("curl "):
            continue
        end = index + 1
        while lines[end - 1].endswith("\\") or "\n".join(lines[index:end]).count("'") % 2:
            end += 1
        words = shlex.split("\n".join(lines[index:end]).replace("\\\n", " "))
        body = words[words.index("-d") + 1] if "-d" in words else None
        answer = lines[end] if end < len(lines) and lines[end].startswith("{") else None
        examples.append(Example(urllib.parse.urlsplit(words[-1]).path, body, answer))
    return examples


@pytest.mark.parametrize("example", _examples(), ids=lambda example: example.path)
def test_the_answer_is_the_one_that_is_printed(send, example):
    method = "GET" if example.body is None else "POST"
    status, body = send(method, example.path, None if example.body is None else example.body.encode())
    found = json.loads(body)
    if example.answer is None:
        assert status == 200
        return
    printed = json.loads(example.answer)
    assert (status == 200) == ("error" not in printed)
    _compare(found, printed)


def _compare(found, printed) -> None:
    assert type(found) is type(printed)
    if isinstance(printed, dict):
        assert found.keys() == printed.keys()
        for key in printed:
            _compare(found[key], printed[key])
    elif isinstance(printed, list):
        assert len(found) == len(printed)
        for pair in zip(found, printed, strict=True):
            _compare(*pair)
    else:
        # Four decimals are printed.
        assert found == (pytest.approx(printed, abs=6e-5) if isinstance(printed, float) else printed)


def test_every_call_of_the_api_is_shown():
    calls = {example.path.rpartition(":")[2] if ":" in example.path else "GET" for example in _examples()}
    assert calls == {"predict", "classify", "regress", "GET"}
    assert any(example.path.endswith("/metadata") for example in _examples())
    assert len(_examples()) == 11
