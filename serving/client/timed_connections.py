"""Connections of HTTP whose time-out is for a whole answer, head and body, not for each of the reads it takes."""

import functools
import http.client
import io
import socket
import time

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection


def timed_pool(url: str, max_kept: int) -> urllib3.HTTPConnectionPool:
    """A pool whose calls keep to `urllib3.Timeout(total=...)` however slowly an answer trickles in.

    Args:
      url: scheme, host and port.
      max_kept: most connections that are kept open between calls.

    Raises:
      LocationParseError or ValueError: `url` is none.
    """
    pool = urllib3.connection_from_url(url, maxsize=max_kept)
    connection = _TimedHTTPSConnection if pool.scheme == "https" else _TimedHTTPConnection
    pool.ConnectionCls = connection  # pyright: ignore[reportAttributeAccessIssue]  # Its own classes do not fit either.
    return pool


class _TimedHTTPConnection(HTTPConnection):
    def getresponse(self) -> urllib3.HTTPResponse:
        # By now the time-out is what is left of the total, the rest having gone into connecting and sending.
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
