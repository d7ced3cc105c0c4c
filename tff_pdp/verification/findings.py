"""Says what was found of each thing that is checked."""

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tff_pdp.errors import UserError


class Status(enum.StrEnum):
    """How a thing is.

    OK: as it was written.
    STOPPED: a process that was stopped left it so. Nothing of what was spent is lost, and the next command that writes
      there mends it.
    OLD: of an earlier version, which kept no digest: read and counted, but damage would not show.
    ABSENT: not here, so not checked; nothing says that it has to be here.
    PROBLEM: damaged, missing, or not what something else says.
    """

    OK = "ok"
    STOPPED = "stopped"
    OLD = "old"
    ABSENT = "absent"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """What was found of one thing.

    Attributes:
      path: of the file or folder.
      status: how the thing is.
      text: what was found, in one line.
    """

    path: Path
    status: Status
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"path": str(self.path), "status": self.status.value, "text": self.text}


def checked(path: Path, check: Callable[[], str | tuple[Status, str]]) -> Finding:
    """Checks one thing.

    Args:
      path: what is named where the check finds a problem.
      check: returns what was found, and how the thing is unless all is well; raises where there is a problem.
    """
    try:
        found = check()
    except (UserError, OSError) as error:
        return Finding(path, Status.PROBLEM, str(error))
    # Files of earlier versions have no digest, and may hold anything.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Finding(path, Status.PROBLEM, f"{path} is damaged ({type(error).__name__}: {error})")
    if isinstance(found, str):
        return Finding(path, Status.OK, found)
    status, text = found
    return Finding(path, status, text)
