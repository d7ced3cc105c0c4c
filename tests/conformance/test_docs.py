"""What docs/serving.md shows is so: requests get the answers printed below them, commands and Python run."""

import dataclasses
import json
import re
import shlex
import urllib.parse
from pathlib import Path

import numpy as np
import pytest

from serving.__main__ import COMMANDS as SERVING_COMMANDS
from serving.client_ids import ClientIdHash
from serving.production.containers import REST_PORT
from tests.conformance.models import CLASSIFIER, IMAGE_SHAPE, TOLERANCE
from tests.places import ROOT
from tests.rounding import half_a_digit
from tests.unrun import parse
from tff_pdp.cli import COMMANDS

# `test_rollout.py` alone starts a server in every change.
pytestmark = pytest.mark.all

TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
REST_ADDRESS = f"127.0.0.1:{REST_PORT}"
TABLES = {"serving": SERVING_COMMANDS, "tff-pdp": COMMANDS}


@dataclasses.dataclass(frozen=True)
class Example:
    """One `curl`: whom it asks, what it sends, and the answer below it, if there is one."""

    host: str
    path: str
    body: str | None
    answer: str | None


def _commands(name: str) -> list[tuple[list[str], str]]:
    """The words of each indented command, and the line below it.

    A command goes on until its quotes are closed and no backslash ends it.
    """
    lines = [line.removeprefix("    ") if line.startswith("    ") else "" for line in TEXT.splitlines()]
    commands = []
    for index, line in enumerate(lines):
        if not line.startswith(f"{name} "):
            continue
        end = index + 1
        while lines[end - 1].endswith("\\") or "\n".join(lines[index:end]).count("'") % 2:
            end += 1
        commands.append((shlex.split("\n".join(lines[index:end]).replace("\\\n", " "), comments=True), lines[end]))
    return commands


def _examples() -> list[Example]:
    examples = []
    for words, below in _commands("curl"):
        body = words[words.index("-d") + 1] if "-d" in words else None
        url = urllib.parse.urlsplit(words[-1])
        examples.append(Example(url.netloc, url.path, body, below if below.startswith("{") else None))
    return examples


@pytest.mark.parametrize("example", _examples(), ids=lambda example: example.path)
def test_the_answer_is_the_one_that_is_printed(send, example):
    assert example.host == REST_ADDRESS
    method = "GET" if example.body is None else "POST"
    status, body = send(method, example.path, None if example.body is None else example.body.encode())
    found = json.loads(body)
    if example.answer is None:
        assert status == 200
        return
    printed = json.loads(example.answer)
    # The one error that is shown is of a version that is not there.
    assert status == (404 if "error" in printed else 200)
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
        # Four decimals are printed, and answers may lie on either side of where they are rounded.
        bound = half_a_digit("0.0001") + TOLERANCE
        assert found == (pytest.approx(printed, abs=bound) if isinstance(printed, float) else printed)


def test_every_call_of_the_api_is_shown():
    calls = {example.path.rpartition(":")[2] if ":" in example.path else "GET" for example in _examples()}
    assert calls == {"predict", "classify", "regress", "GET"}
    assert any(example.path.endswith("/metadata") for example in _examples())
    assert len(_examples()) == TEXT.count("curl ")


@pytest.mark.parametrize(
    "words", [words for name in TABLES for words, _ in _commands(name)], ids=lambda words: " ".join(words[:2])
)
def test_the_commands_are_understood(words):
    parse(TABLES[words[0]], words[1:])


def test_the_python_runs(addresses, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert REST_ADDRESS in code
    monkeypatch.chdir(tmp_path)
    Path("runs/demo").mkdir(parents=True)
    ClientIdHash.load_or_create(Path("runs/demo/client_id.key"))
    code = code.replace(REST_ADDRESS, addresses.rest).replace("digits", CLASSIFIER).replace("_seconds=2", "_seconds=30")
    names = {"x": np.zeros((2, *IMAGE_SHAPE), np.float32)}
    exec(code, names)
    assert names["prediction"].personalized.tolist() == [False, False]
