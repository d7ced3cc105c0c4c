"""One call over an unreliable network: how it fails, its deadline, and when it is tried again."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from tff_pdp.errors import ServingError

DEADLINE_EXCEEDED, UNAVAILABLE = "DEADLINE_EXCEEDED", "UNAVAILABLE"
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0

Answer = TypeVar("Answer")


class ServerError(ServingError):
    """A server answered with an error, or not at all.

    Attributes:
      address: who was asked: `host:port`, or the URL.
      code: gRPC's name of the status, such as `NOT_FOUND`; of an answer over REST the HTTP status, such as `404`.
      message: what the server said.
    """

    def __init__(self, address: str, code: str, message: str):
        super().__init__(f"{address} answered {code}: {message}")
        self.address = address
        self.code = code
        self.message = message


class UnavailableError(ServerError):
    """Nobody answered, or the server said that it cannot at the moment. The one failure that is tried again."""

    def __init__(self, address: str, code: str, message: str):
        super().__init__(address, code, message)
        self.args = (f"{address} cannot be reached ({code}): {message.rstrip('.')}. Is the server running?",)


class Deadline:
    """The end of one call, its retries and parts included."""

    def __init__(self, seconds: float):
        """Starts now."""
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self, address: str) -> float:
        """Seconds left, above 0.

        Raises:
          ServerError: none are left.
        """
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise self.error(address)
        return seconds

    def error(self, address: str) -> ServerError:
        """What to raise when the time is over."""
        return ServerError(address, DEADLINE_EXCEEDED, f"no answer within {self._seconds:g} seconds")


def call_with_retries(
    attempt: Callable[[float], Answer], address: str, deadline: Deadline, max_attempts: int
) -> Answer:
    """Calls `attempt` until it answers, fails for good, or the attempts or the time are used up.

    Pauses double from one attempt to the next and are drawn from the upper half of their length, so that clients that
    failed together do not return together.

    Args:
      attempt: makes one attempt within the seconds it is given; raises `UnavailableError` where another may help.
      address: who is asked.
      deadline: the end of all attempts.
      max_attempts: at least 1.

    Raises:
      UnavailableError: no attempt was answered.
      ServerError: the deadline passed, or whatever else `attempt` raises.
    """
    longest = FIRST_PAUSE_SECONDS
    for attempts_left in reversed(range(max_attempts)):
        try:
            return attempt(deadline.remaining(address))
        except UnavailableError:
            pause = random.uniform(longest / 2, longest)
            if not attempts_left or pause >= deadline.remaining(address):
                raise
        time.sleep(pause)
        longest = min(2 * longest, LONGEST_PAUSE_SECONDS)
    raise AssertionError("max_attempts is at least 1")
