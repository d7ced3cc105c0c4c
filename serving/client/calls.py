"""Makes one call over an unreliable network: its errors, its deadline and its retries.

Over HTTP, a time-out holds for the whole answer, head and body, not for each read.
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
    """A server answered with an error, or not at all.

    Attributes:
      address: the server's `host:port`, or the URL.
      code: gRPC's name of the status, such as `NOT_FOUND`, or over REST the HTTP status, such as `404`.
      message: message of the server.
    """

    def __init__(self, address: str, code: str, message: str):
        super().__init__(f"{address} answered {code}: {message}")
        self.address = address
        self.code = code
        self.message = message


class UnavailableError(ServerError):
    """Nobody answered, or the server is unavailable at the moment. Only after this error is a call tried again."""

    def __init__(self, address: str, code: str, message: str):
        super().__init__(address, code, message)
        self.args = (f"{address} cannot be reached ({code}): {message.rstrip('.')}. Is the server running?",)


class Deadline:
    """The time limit of one call, retries and parts included."""

    def __init__(self, seconds: float):
        """Starts the time."""
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self, address: str) -> float:
        """Returns the seconds left, above 0; raises ServerError if the time is over."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise self.error(address)
        return seconds

    def error(self, address: str) -> ServerError:
        """Builds the error of a call whose time is over."""
        return ServerError(address, DEADLINE_EXCEEDED, f"no answer within {self._seconds:g} seconds")


def call_with_retries(
    attempt: Callable[[float], Answer], address: str, deadline: Deadline, max_attempts: int
) -> Answer:
    """Calls `attempt` until it returns or fails for good, or the attempts or the time are used up.

    The longest pause doubles from one attempt to the next. A pause is drawn between half of the longest pause and all
    of it, so that clients that failed together do not return together.

    Args:
      attempt: makes one attempt within the given seconds; raises `UnavailableError` if another attempt may help.
      address: address of the server, for messages.
      deadline: time limit of all attempts together.
      max_attempts: largest number of attempts, at least 1.

    Raises:
      UnavailableError: no attempt was answered.
      ServerError: the deadline passed, or an attempt failed for good.
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
    """Builds a pool of connections that keep to `urllib3.Timeout(total=...)`, however slowly an answer arrives.

    At most `max_kept` connections are kept open between calls. `url` has scheme, host and port; if it is malformed,
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
