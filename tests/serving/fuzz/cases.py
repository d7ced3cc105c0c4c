"""What one hostile request is, and what may come back: every case follows from a seed and a number."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np

# Stands in every id and every text that is sent as a value, so that a log that quotes values is caught.
MARKER = "zqmarkerqz"
NUMERIC_MARKER = 7731.4242


class Oracle(enum.Enum):
    """What counts as right.

    Wherever a case has an expected answer, status 200 must bring exactly that one, whatever the oracle.
    """

    ANSWERED = "answered: status 200 with the expected answer"
    REFUSED = "refused: a status that blames the request, with a short message"
    ODD = "odd: answered or refused, never a fault of the server"
    BROKEN = "broken: not a request, so it may also be dropped without an answer"


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model under attack and what it answers.

    Attributes:
      name: its name in requests.
      input_shape: of one example.
      examples: float32 `[examples, *input_shape]`; each value has a short decimal form.
      answers: for each known id, and `""` for all others, the probabilities `[examples, classes]` of these examples.
      canary_names: model names that would reach files outside the model's folder if they were taken for paths.
    """

    name: str
    input_shape: tuple[int, ...]
    examples: np.ndarray
    answers: Mapping[str, np.ndarray]
    canary_names: Sequence[str] = ()

    def expected(self, client_ids: Sequence[str | bytes], rows: Sequence[int]) -> np.ndarray:
        """Probabilities `[batch, classes]` of these clients' models on these examples."""
        known = {client_id.encode(): answer for client_id, answer in self.answers.items()}
        as_bytes = [one.encode("utf-8", "surrogatepass") if isinstance(one, str) else one for one in client_ids]
        pairs = zip(as_bytes, rows, strict=True)
        return np.stack([known.get(client_id, known[b""])[row] for client_id, row in pairs])


@dataclasses.dataclass(frozen=True)
class HttpCase:
    """Bytes for one connection.

    Attributes:
      category: names the generator.
      parts: sent one after another, with a short pause between them.
      oracle: what counts as right.
      expected: the answer, if status 200 can have only one.
      num_answers: how many responses to read.
      abandon: close at once after sending, without reading.
      half_close: end the sending side, then read.
      to_grpc_port: sent to the gRPC port instead.
    """

    category: str
    parts: Sequence[bytes]
    oracle: Oracle = Oracle.BROKEN
    expected: np.ndarray | None = None
    num_answers: int = 1
    abandon: bool = False
    half_close: bool = False
    to_grpc_port: bool = False

    def __str__(self) -> str:
        sent = b" | ".join(self.parts)
        return f"{self.category} ({self.oracle.name}), {len(sent)} bytes: {sent[:600]!r}"


@dataclasses.dataclass(frozen=True)
class GrpcCase:
    """One call.

    Attributes:
      category: names the generator.
      method: such as `/tensorflow.serving.PredictionService/Predict`.
      message: the bytes of the request.
      oracle: what counts as right.
      expected: the answer, if OK can have only one.
      metadata: pairs that are sent along.
      deadline_seconds: of the call; None for the general limit.
      compressed: by gzip.
    """

    category: str
    method: str
    message: bytes
    oracle: Oracle = Oracle.ODD
    expected: np.ndarray | None = None
    metadata: Sequence[tuple[str, str | bytes]] = ()
    deadline_seconds: float | None = None
    compressed: bool = False

    def __str__(self) -> str:
        return f"{self.category} ({self.oracle.name}) {self.method}, {len(self.message)} bytes: {self.message[:600]!r}"


Case = HttpCase | GrpcCase
