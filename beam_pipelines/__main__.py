"""The command line of the jobs: `python -m beam_pipelines femnist --input DIR --output DIR`."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from beam_pipelines.commands import add_contact_graph_command, add_epidemic_commands, add_image_commands
from tff_pdp.errors import UserError, sentence_for_user


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one job; returns 0 for success, 2 for a problem the user can mend."""
    options, pipeline_args = build_parser().parse_known_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Beam reports optional packages it does not find; ours are the only warnings a user can act on.
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("beam_pipelines").setLevel(logging.WARNING)
    try:
        print(options.run(options, tuple(pipeline_args)))
    except (UserError, OSError) as error:
        sentence = sentence_for_user(error)
        if sentence is None:
            raise
        print(f"beam_pipelines {options.job}: {sentence}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser. Parsed options have `run`, a function of them and of the flags that it did not know."""
    parser = argparse.ArgumentParser(prog="python -m beam_pipelines", description="Turn raw data into client datasets.")
    jobs = parser.add_subparsers(dest="job", required=True, metavar="JOB")
    add_image_commands(jobs)
    add_contact_graph_command(jobs)
    add_epidemic_commands(jobs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
