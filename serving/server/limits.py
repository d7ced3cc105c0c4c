"""How much one request may ask of the server."""

import dataclasses

from tff_pdp.errors import ServingError


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds on requests.

    Attributes:
      max_bytes: largest request accepted, after it is unpacked; a larger REST body is answered with 413.
      max_elements: most elements in one gRPC input tensor, which may stand for more than its bytes.
      timeout_seconds: how long a REST client may take to send its headers, to send its body, to take its answer, and to
        keep a connection idle.
      grace_seconds: how long running requests may go on when the server stops.
    """

    max_bytes: int = 64 * 2**20
    max_elements: int = 16 * 2**20
    timeout_seconds: float = 30.0
    grace_seconds: float = 5.0

    def __post_init__(self):
        """Checks the values.

        Raises:
          ServingError: naming the first that is not positive.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ServingError(f"{field.name} must be positive; was {value}")
