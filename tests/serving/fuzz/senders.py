"""Sends one case and says what was wrong with the answer, if anything."""

import contextlib
import dataclasses
import json
import math
import re
import select
import socket
import struct
import time
from typing import Any

import grpc
import numpy as np
import tensorflow as tf

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import classification_pb2, predict_pb2

from tests.rounding import ELEMENTARY, gamma
from tests.serving.fuzz.cases import Case, GrpcCase, HttpCase, Oracle
from tests.serving.fuzz.proto_messages import CLASSIFY, MULTI, PREDICT, RELOAD, decodable

LIMIT_SECONDS = 20.0
# A server that waits for the rest of a broken request is told after this time that there is none.
_QUIET_SECONDS = 0.3
_PAUSE_SECONDS = 0.02
_MAX_ERROR_CHARACTERS = 5_000
# How far probabilities in float32 may lie apart: scores sum over 16 inputs of up to 2 and over 4 hidden units, with
# kernels below Glorot's limits; what they lose moves a probability by half of it, here and there. Then come an
# exponential, a sum over three classes and a quotient; and for the sum of a row, the three once more.
_TOLERANCE = gamma(16 + 1 + 4 + 1) * (16 * 2 * math.sqrt(6 / 20)) * (4 * math.sqrt(6 / 7)) + 2 * gamma(
    2 * ELEMENTARY + 4
)
_OF_SUM = gamma(2 * ELEMENTARY + 4 + 3)
# What HTTP calls codings and versions that a server does not have.
_BROKEN_ALLOWED = {501, 505}
_GRPC_REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED"}


class Wrong(Exception):
    """An answer, or the lack of one, that the case does not allow."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One HTTP response."""

    status: int
    body: bytes


def send(case: Case, rest_port: int, grpc_port: int, channel: grpc.Channel) -> str:
    """Sends a case and checks what comes back.

    Returns:
      What came back, in a word.

    Raises:
      Wrong: saying what is wrong with it.
    """
    if isinstance(case, GrpcCase):
        return _call(case, channel)
    answers = _exchange(case, grpc_port if case.to_grpc_port else rest_port)
    if case.to_grpc_port or case.abandon:
        return "dropped"
    check_http(case, answers)
    return str(answers[0].status) if answers else "dropped"


def _exchange(case: HttpCase, port: int) -> list[Answer]:
    """Sends the parts and reads until all answers are there or the server closes."""
    deadline = time.monotonic() + LIMIT_SECONDS
    received = bytearray()
    is_head = case.parts[:1] and case.parts[0].startswith(b"HEAD ")
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        pending = [memoryview(part) for part in case.parts]
        ended, quiet_since, next_send = False, time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if now > deadline:
                raise Wrong(f"no end after {LIMIT_SECONDS:.0f} s; received {bytes(received[:300])!r}")
            if not pending and not ended:
                if case.abandon:
                    # A reset, as of a client that died, half of the time.
                    if len(case.parts[0]) % 2:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return []
                if case.half_close or (now - quiet_since > _QUIET_SECONDS and case.oracle is Oracle.BROKEN):
                    # The server may have closed already; what it said before can still be read.
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)
                    ended = True
            writable = bool(pending) and now >= next_send
            readers, writers, _ = select.select([connection], [connection] if writable else [], [], 0.02)
            if writers:
                try:
                    count = connection.send(pending[0])
                    pending[0] = pending[0][count:]
                    if not pending[0]:
                        del pending[0]
                        next_send = now + _PAUSE_SECONDS
                except OSError:
                    pending, ended = [], True
                quiet_since = now
            if readers:
                try:
                    data = connection.recv(1 << 18)
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError:
                    data = b""
                if not data:
                    return split_answers(bytes(received), bool(is_head), closed=True)
                received += data
                quiet_since = now
                answers = split_answers(bytes(received), bool(is_head), closed=False)
                if len(answers) >= case.num_answers:
                    return answers


def split_answers(received: bytes, is_head: bool, *, closed: bool) -> list[Answer]:
    """Splits complete HTTP responses; a part of one at the end is dropped.

    Raises:
      Wrong: the bytes are no HTTP response.
    """
    found = []
    while received:
        head, separator, rest = received.partition(b"\r\n\r\n")
        if not separator:
            return found
        match = re.match(rb"HTTP/\d\.\d (\d{3}) ", head + b" ")
        if not match:
            raise Wrong(f"the answer is no HTTP: {received[:200]!r}")
        status = int(match[1])
        if status < 200:
            received = rest
            continue
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        if length is None and not is_head and re.search(rb"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE):
            end = rest.find(b"0\r\n\r\n")
            if end < 0:
                return found
            body, received = rest[:end], rest[end + 5 :]
        elif length is None and not is_head:
            if not closed:
                return found
            body, received = rest, b""
        else:
            size = 0 if is_head or length is None else int(length[1])
            if len(rest) < size:
                return found
            body, received = rest[:size], rest[size:]
        found.append(Answer(status, body))
    return found


def check_http(case: HttpCase, answers: list[Answer]) -> None:
    """Checks the answers of one connection.

    Raises:
      Wrong: saying what the case does not allow.
    """
    if case.oracle is not Oracle.BROKEN and len(answers) < case.num_answers:
        raise Wrong(f"{len(answers)} answers instead of {case.num_answers}")
    for answer in answers:
        shown = f"status {answer.status}: {answer.body[:300]!r}"
        if answer.status >= 500 and not (case.oracle is Oracle.BROKEN and answer.status in _BROKEN_ALLOWED):
            raise Wrong(f"a fault of the server, {shown}")
        if 200 < answer.status < 400:
            raise Wrong(f"neither answered nor refused, {shown}")
        if case.oracle is Oracle.ANSWERED and answer.status != 200:
            raise Wrong(f"a valid request is refused, {shown}")
        if case.oracle is Oracle.REFUSED and answer.status == 200:
            raise Wrong(f"a wrong request is answered, {shown}")
        if answer.status != 200:
            _check_error(case, answer)
        elif case.expected is not None:
            _check_equal(_probabilities(answer.body), case.expected)
        elif b":predict" in case.parts[0][:400] and case.oracle is not Oracle.BROKEN:
            _check_plausible(_probabilities(answer.body))
        # Bytes that follow a request may be taken for another one, with an answer of its own.
        if case.num_answers == 1:
            break


def _check_error(case: HttpCase, answer: Answer) -> None:
    if len(answer.body) > 12 * _MAX_ERROR_CHARACTERS or b"Traceback" in answer.body:
        raise Wrong(f"an error of {len(answer.body)} bytes: {answer.body[:300]!r}")
    if b"root:x:0" in answer.body:
        raise Wrong("the answer quotes /etc/passwd")
    target = case.parts[0].split(b" ", 2)[1:2] if case.parts else []
    if case.oracle is Oracle.BROKEN or not target or not re.match(rb"/v1/models(/|$)", target[0].split(b"?")[0]):
        return
    try:
        message = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError) as error:
        raise Wrong(f"an error that is not JSON: {answer.status} {answer.body[:300]!r}") from error
    if not isinstance(message, str) or not 0 < len(message) <= _MAX_ERROR_CHARACTERS:
        raise Wrong(f"an error of {len(message)} characters")


def _probabilities(body: bytes) -> np.ndarray:
    """Reads the probabilities out of an answer in either format.

    Raises:
      Wrong: it has none.
    """
    try:
        document = json.loads(body)
        if "results" in document:
            return np.array([[score for _, score in one] for one in document["results"]], np.float32)
        if "outputs" in document:
            columns = document["outputs"]
        else:
            columns = {key: [row[key] for row in document["predictions"]] for key in document["predictions"][0]}
        probabilities = np.array(columns["probabilities"], np.float32)
        if len(columns["personalized"]) != len(probabilities):
            raise Wrong(f"outputs of different lengths: {body[:300]!r}")
        return probabilities
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Wrong(f"not the answer of the model ({error!r}): {body[:300]!r}") from error


def _check_equal(probabilities: np.ndarray, expected: np.ndarray) -> None:
    if probabilities.shape != expected.shape or not np.allclose(probabilities, expected, 0, _TOLERANCE):
        raise Wrong(f"another answer: {probabilities.tolist()} instead of {expected.tolist()}")


def _check_plausible(probabilities: np.ndarray) -> None:
    """Rows are distributions; a finite but enormous input may overflow to NaN."""
    if probabilities.size == 0:
        return
    if probabilities.ndim != 2:
        raise Wrong(f"an answer of shape {probabilities.shape}")
    sums = probabilities.sum(axis=1)
    if not np.all(np.isnan(sums) | (np.abs(sums - 1) < _OF_SUM)):
        raise Wrong(f"not probabilities: {probabilities.tolist()}")


def _call(case: GrpcCase, channel: grpc.Channel) -> str:
    call: Any = channel.unary_unary(case.method)
    compression = grpc.Compression.Gzip if case.compressed else None
    limit = LIMIT_SECONDS if case.deadline_seconds is None else case.deadline_seconds
    try:
        response = call(case.message, timeout=limit, metadata=case.metadata, compression=compression)
    except grpc.RpcError as error:
        _check_refusal(case, error)
        return error.code().name  # pyright: ignore[reportAttributeAccessIssue]
    if case.oracle is Oracle.REFUSED:
        raise Wrong(f"a wrong request is answered: {response[:300]!r}")
    _check_response(case, response)
    return "OK"


def _check_refusal(case: GrpcCase, error: Any) -> None:
    code, details = error.code().name, error.details() or ""
    shown = f"{code}: {details[:500]}"
    if len(details) > _MAX_ERROR_CHARACTERS or "Traceback" in details:
        raise Wrong(f"an error of {len(details)} characters: {shown}") from error
    # What the server says has to pass the limits of an ordinary client.
    if "received metadata size exceeds" in details and case.category != "metadata":
        raise Wrong(f"the message of the status is too long to be received, {shown}") from error
    if case.deadline_seconds is not None and code in ("DEADLINE_EXCEEDED", "CANCELLED"):
        return
    if case.oracle is Oracle.ANSWERED:
        raise Wrong(f"a valid request is refused, {shown}") from error
    if code == "UNIMPLEMENTED":
        if case.category == "unknown methods" or case.method == MULTI:
            return
        raise Wrong(f"a known method is not there, {shown}") from error
    if case.method == RELOAD and code in ("PERMISSION_DENIED", "UNKNOWN"):
        return
    # What is no message never reaches a handler, here and in TensorFlow Serving.
    if code == "INTERNAL" and not decodable(case.method, case.message):
        return
    if code not in _GRPC_REFUSALS:
        raise Wrong(f"a fault of the server, {shown}") from error


def _check_response(case: GrpcCase, response: bytes) -> None:
    if case.method == CLASSIFY:
        result = classification_pb2.ClassificationResponse.FromString(response).result
        probabilities = np.array([[one.score for one in example.classes] for example in result.classifications])
    elif case.method == PREDICT:
        outputs = predict_pb2.PredictResponse.FromString(response).outputs
        # A filter of outputs, or another signature, may have left them out.
        if "probabilities" not in outputs:
            return
        probabilities = tf.make_ndarray(outputs["probabilities"])
    else:
        return
    if case.expected is None:
        _check_plausible(probabilities)
    else:
        _check_equal(probabilities, case.expected)
