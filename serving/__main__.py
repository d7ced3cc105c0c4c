"""Defines the program `serving` (or `python -m serving`), whose commands are also commands of the program `tff-pdp`."""

import functools
import sys

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
# Runs one command, and returns its exit status.
main = functools.partial(command_line.main, COMMANDS)

if __name__ == "__main__":
    sys.exit(main())
