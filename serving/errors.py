"""Defines `RequestError`, which has a gRPC status code, an HTTP status and a message of limited length."""

import logging
import traceback

import grpc

MAX_MESSAGE_CHARACTERS = 4096

HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

# Status codes by number, such as the number in `tf.errors.OpError.error_code`.
CODE_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class RequestError(Exception):
    """The error of a request that cannot be answered, with the gRPC status code and the message for the caller."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code
        self.message = message[:MAX_MESSAGE_CHARACTERS]

    @property
    def http_status(self) -> int:
        """Returns the HTTP status that TensorFlow Serving sends for the code; 500 for codes not in `HTTP_STATUS`."""
        return HTTP_STATUS.get(self.code, 500)


def invalid_argument(message: str) -> RequestError:
    """Builds a `RequestError` with the code INVALID_ARGUMENT, for a request that is itself wrong."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)


INTERNAL_ERROR = "Internal error; see the server's log."


def log_failure(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Logs that `what` failed, with the error's type and traceback, without the message, which may quote a request."""
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed with %s:\n%s", what, type(error).__name__, places)
