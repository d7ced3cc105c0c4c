"""The one exception family a user is meant to read: each message names what is wrong, where, and what to do."""


class UserError(Exception):
    """Bad input or an impossible request. The command line prints the message alone and exits with status 2."""


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
