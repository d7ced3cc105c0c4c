"""The door to the commands on exports: `serving` or `python -m serving`; `tff-pdp` has the same."""

import sys
from collections.abc import Sequence

from tff_pdp import command_line

COMMANDS = command_line.Table(
    "serving",
    "Work on exports of personal models.",
    {
        "serve": "serving.commands:Serve",
        "verify": "serving.commands:Verify",
        "client-id": "serving.commands:ClientId",
        "deploy": "serving.commands:Deploy",
        "rollout": "serving.commands:Rollout",
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 fine, 1 an export is refused, 2 the command makes no sense."""
    return command_line.main(COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
