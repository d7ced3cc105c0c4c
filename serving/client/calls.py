"""Makes calls over an unreliable network, with a deadline and retries, and defines the errors of calls.

Over HTTP, a time-out limits the time of the whole answer (head and body), not the time of each read.
"""

import functools
import http.client
import io
import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from tff_pdp.errors import ServingError

DEADLINE_EXCEEDED, UNAVAILABLE = "DEADLINE_EXCEEDED", "UNAVAILABLE"
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0

Answer = TypeVar("Answer")


class ServerError(ServingError):
    """A server answered with an error, or did not answer.

    Attributes:
      address: the server's `host:port`, or its URL.
      code: over gRPC the name of the status, such as `NOT_FOUND`; over REST the HTTP status, such as `404`.
      message: the server's message.
    """

    def __init__(self, address: str, code: str, message: str):
        super().__init__(f"{address} answered {code}: {message}")
        self.address = address
        self.code = code
        self.message = message


class UnavailableError(ServerError):
    """No server answered, or the server reports that it is unavailable. Only after this error are calls retried."""

    def __init__(self, address: str, code: str, message: str):
        super().__init__(address, code, message)
        self.args = (f"{address} cannot be reached ({code}): {message.rstrip('.')}. Is the server running?",)


class Deadline:
    """The time limit of one call, including all retries and, if the batch is divided, the requests of all parts."""

    def __init__(self, seconds: float):
        """Sets the deadline to `seconds` from now."""
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self, address: str) -> float:
        """Returns the seconds until the deadline; raises ServerError, which names `address`, after the deadline."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise self.error(address)
        return seconds

    def error(self, address: str) -> ServerError:
        """Builds the error of a call to `address` that was not answered before the deadline."""
        return ServerError(address, DEADLINE_EXCEEDED, f"no answer within {self._seconds:g} seconds")


def call_with_retries(
    attempt: Callable[[float], Answer], address: str, deadline: Deadline, max_attempts: int
) -> Answer:
    """Returns the result of `attempt`; calls it again after each `UnavailableError`, while attempts and time are left.

    The pause before a retry is random, between half of a limit and the limit, so that clients that failed at the same
    moment do not all retry at the same moment. The limit is 0.1 seconds at first, and doubles up to 2 seconds.

    Args:
      attempt: function that makes one attempt, with the attempt's time limit in seconds as its argument; it raises
        `UnavailableError` if another attempt may help.
      address: address of the server, for messages.
      deadline: time limit of all attempts together.
      max_attempts: largest number of attempts, at least 1.

    Raises:
      UnavailableError: the last attempt that `max_attempts` and the deadline allow failed with this error.
      ServerError: the deadline passed, or an attempt failed with another error.
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


def timed_pool(url: str, max_kept: int) -> urllib3.HTTPConnectionPool:
    """Builds a connection pool in which `urllib3.Timeout(total=...)` also limits answers that arrive in small pieces.

    At most `max_kept` connections stay open between calls. `url` has scheme, host and port; if `url` is malformed,
    LocationParseError or ValueError is raised.
    """
    pool = urllib3.connection_from_url(url, maxsize=max_kept)
    connection = _TimedHTTPSConnection if pool.scheme == "https" else _TimedHTTPConnection
    pool.ConnectionCls = connection  # pyright: ignore[reportAttributeAccessIssue]  # Its own classes do not fit either.
    return pool


class _TimedHTTPConnection(HTTPConnection):
    def getresponse(self) -> urllib3.HTTPResponse:
        # By now connecting and sending have used up a part of the total time-out.
        build = functools.partial(_TimedResponse, end=time.monotonic() + (self.timeout or 0))
        self.response_class = build  # pyright: ignore[reportAttributeAccessIssue]  # It is only called.
        return super().getresponse()


class _TimedHTTPSConnection(_TimedHTTPConnection, HTTPSConnection):
    pass


class _TimedResponse(http.client.HTTPResponse):
    """Reads from the socket until a moment of the monotonic clock."""

    def __init__(self, sock: socket.socket, *arguments, end: float, **options):
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock, end))


class _TimedReader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: socket.socket, end: float):
        self._raw = raw
        self._socket = sock
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int | None:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        # A time-out of the socket is for one read.
        self._socket.settimeout(seconds)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
