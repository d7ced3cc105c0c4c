"""Defines exceptions with messages for users: each message says what is wrong, where, and what to do."""

import errno
import os

# A user makes room, gives rights, or takes another disk.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)


class UserError(Exception):
    """Bad input or an impossible request. The command line prints the message alone and exits with status 2.

    >>> import tff_pdp
    >>> try:
    ...     tff_pdp.load_experiment("demo", {"training.rounds": 0})
    ... except tff_pdp.UserError as error:
    ...     print(error)
    demo: training.rounds must be a whole number of at least 1, not 0
    """


class ConfigError(UserError):
    """A configuration file has an unknown key, a missing key or a value out of range."""


class DataError(UserError):
    """Input data is missing, malformed or inconsistent."""


class BudgetError(UserError):
    """A privacy budget cannot be met, or a step would overspend it."""


class EngineError(UserError):
    """The engine that executes TFF computations did not start, or stopped."""


class ServingError(UserError):
    """An export is unusable, or a server could not be started or reached."""


def sentence_for_user(error: UserError | OSError) -> str | None:
    """Describes in one line an error that a user can mend: a `UserError`, or a disk error with the file's name.

    Returns:
      The line; None for other system errors, which are faults of the program and need a traceback.
    """
    if isinstance(error, UserError):
        return str(error)
    if error.errno not in _OF_THE_DISK:
        return None
    return f"{error.filename2 or error.filename or 'a file'}: {os.strerror(error.errno)}"
