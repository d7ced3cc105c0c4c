"""Faults of the server itself: the log says where, and nobody is told the values of a request."""

import logging
import traceback

INTERNAL_ERROR = "Internal error; see the server's log."


def log_failure(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Logs the type and place of an unexpected error, not its message, which may quote what a client sent."""
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed with %s:\n%s", what, type(error).__name__, places)
