"""The alarms of the fuzzer go off."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.serving.fuzz import senders
from tests.serving.fuzz.cases import MARKER, HttpCase, Oracle
from tests.serving.fuzz.invariants import MAX_MORE_FILES, FileWatch, ProcessWatch, log_problems


def test_an_opened_file_is_noticed(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"x")
    watch = FileWatch([file, tmp_path])
    assert watch.problems() == []
    file.read_bytes()
    assert watch.problems() == [f"{tmp_path} was opened", f"{file} was opened"]
    os.listdir(tmp_path)
    assert watch.problems() == [f"{tmp_path} was opened"]
    assert watch.problems() == []
    watch.close()


def test_a_process_that_ended_or_grew_is_noticed():
    program = "import sys; sys.stdin.readline(); kept = [open('/dev/null') for _ in range(99)]; print(1, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}; sys.stdin.readline()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    watch = ProcessWatch(process)
    assert process.stdin is not None and process.stdout is not None
    assert watch.problems(idle=True) == []
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()
    (files,) = watch.problems(idle=True)
    assert files.startswith("files grew") and files.endswith(f"more than {MAX_MORE_FILES}")
    process.communicate("\n")
    assert watch.problems(idle=True) == ["the server ended with exit status 0"]


def test_values_and_tracebacks_in_the_log_are_noticed(tmp_path):
    log = tmp_path / "log"
    log.write_text("fine\n")
    assert log_problems(log) == []
    log.write_text(f"fine\nid {MARKER}7\nTraceback (most recent call last):\n  x\n")
    value, traceback = log_problems(log)
    assert value.startswith("line 2 ") and traceback.startswith("line 3 ")


def _check(oracle, status, body, expected=None):
    case = HttpCase("test", [b"POST /v1/models/toy:predict HTTP/1.1\r\n"], oracle, expected)
    senders.check_http(case, [senders.Answer(status, body)])


_ANSWER = b'{"outputs": {"probabilities": [[0.25, 0.75]], "personalized": [true]}}'
_ERROR = b'{"error": "why"}'


def test_right_answers_pass():
    _check(Oracle.ANSWERED, 200, _ANSWER, np.array([[0.25, 0.75]]))
    _check(Oracle.REFUSED, 400, _ERROR)
    _check(Oracle.ODD, 404, _ERROR)
    _check(Oracle.BROKEN, 501, b"not JSON")


@pytest.mark.parametrize(
    ("oracle", "status", "body"),
    [
        (Oracle.ANSWERED, 200, _ANSWER.replace(b"0.25", b"0.26")),
        (Oracle.ANSWERED, 400, _ERROR),
        (Oracle.REFUSED, 200, _ANSWER),
        (Oracle.ODD, 500, _ERROR),
        (Oracle.ODD, 400, b"no JSON"),
        (Oracle.ODD, 400, b'{"error": "' + b"x" * 6_000 + b'"}'),
        (Oracle.ODD, 301, b""),
        (Oracle.BROKEN, 500, b""),
        (Oracle.BROKEN, 400, b"x" * 100_000),
    ],
)
def test_wrong_answers_are_noticed(oracle, status, body):
    with pytest.raises(senders.Wrong):
        _check(oracle, status, body, np.array([[0.25, 0.75]]))


def test_answers_are_split():
    two = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"
        b"HTTP/1.1 400 No\r\ncontent-length: 1\r\n\r\nc"
    )
    answers = senders.split_answers(two, False, closed=False)
    assert answers == [senders.Answer(200, b"ab"), senders.Answer(400, b"c")]
    assert senders.split_answers(two[:-1], False, closed=True) == answers[:1]
    with pytest.raises(senders.Wrong):
        senders.split_answers(b"<html>\r\n\r\n", False, closed=True)
