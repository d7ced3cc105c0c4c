"""The command line of serving: verify exports, hash clients' ids, and what production needs.

TensorFlow is imported by the process that verifies, never by this one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.client_ids import ClientIdHash
from serving.commands import add_commands
from tff_pdp.errors import ServingError, UserError, sentence_for_user

VERIFY = """\
checks an export without trusting it, and exits with 0 if it is fine, 1 if it is refused:
  - plain files only, each as the manifest hashes it
  - a graph of allowed ops that reads its own variables and assets and writes nothing
  - in a process of its own: loading as TensorFlow Serving does, the stored warm-up requests, saved_model_cli
a SavedModel is a program: the checks find damage and well-known abuse, and are no reason to serve a stranger's export
"""

CLIENT_ID = """\
an export holds keyed hashes instead of clients' ids; this prints what requests must send for an id
keep the key as secret as the ids: whoever has it can tell who is in an export
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 fine, 1 an export is refused, 2 the command makes no sense."""
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except (UserError, OSError) as error:
        sentence = sentence_for_user(error)
        if sentence is None:
            raise
        print(f"serving {options.command}: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"serving {options.command}: stopped", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands."""
    parser = argparse.ArgumentParser(prog="serving", description="Work on exports of personal models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    verify = _command(commands, "verify", "Check exports before they are served.", VERIFY)
    verify.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a version, or a folder of versions")
    verify.add_argument("--latest", action="store_true", help="of a folder of versions only the highest")
    verify.add_argument("--json", action="store_true", help="print one JSON document with everything that was found")
    verify.add_argument("--timeout", type=float, default=120, metavar="S", help="seconds for each export; default 120")
    verify.set_defaults(run=_verify)

    client_id = _command(commands, "client-id", "Print the hashed ids that requests send.", CLIENT_ID)
    client_id.add_argument("ids", nargs="+", metavar="ID", help="a client's id as the clients' data has it")
    client_id.add_argument("--key", required=True, type=Path, metavar="FILE", help="the key that export wrote")
    client_id.set_defaults(run=_client_id)

    add_commands(commands)
    return parser


def _command(commands, name: str, help_text: str, epilog: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=help_text,
        description=help_text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _verify(options: argparse.Namespace) -> int:
    from serving.verify.fresh_process import FreshProcess
    from serving.verify.verify import verify_export, versions_below

    exports = [export for path in options.directories for export in versions_below(path, latest=options.latest)]
    results, refused = [], False
    with FreshProcess(options.timeout) as process:
        for export_dir in exports:
            try:
                verified = verify_export(export_dir, process=process)
            except ServingError as error:
                refused = True
                # TensorFlow's reasons go over many lines.
                reason = " ".join(str(error).split())
                results.append({"export_dir": str(export_dir), "refused": reason})
                if not options.json:
                    print(f"{export_dir}: REFUSED: {reason}")
            else:
                results.append(verified.to_json())
                if not options.json:
                    print(verified.summary())
    if options.json:
        print(json.dumps(results, indent=2))
    return 1 if refused else 0


def _client_id(options: argparse.Namespace) -> int:
    hash_id = ClientIdHash.load(options.key)
    for client_id in options.ids:
        print(hash_id(client_id))
    return 0


if __name__ == "__main__":
    sys.exit(main())
