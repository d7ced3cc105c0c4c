"""The command line of serving: verify exports, hash clients' ids, write a kit for production, move labels.

TensorFlow is imported by the process that verifies and by `rollout`, and not before.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.client_ids import ClientIdHash
from serving.production.containers import KitOptions
from serving.tf_serving import CONFIG_FILE
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

DEPLOY = """\
writes into FOLDER what TensorFlow Serving needs: models.config with every model that has a complete version,
batching and monitoring parameters, a Compose file, Kubernetes manifests, and a README with the commands
"""

ROLLOUT = """\
serves two versions of a model under the labels stable and canary, or makes the canary stable:
  serving rollout runs/x/export/digits --model-name digits --stable 3 --canary 4 --address 127.0.0.1:8500
  serving rollout runs/x/export/digits --model-name digits --promote --address 127.0.0.1:8500
  serving rollout runs/x/export/digits --model-name digits --stable 3      # back to the old version
with an address, the server loads the versions first and moves the labels then; models.config is written last, and
where the server fails on the way it is sent the list of before again
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

    _add_deploy(commands)
    _add_rollout(commands)
    return parser


def _add_deploy(commands) -> None:
    defaults = KitOptions()
    deploy = _command(commands, "deploy", "Write the files that TensorFlow Serving needs in production.", DEPLOY)
    deploy.add_argument(
        "paths", nargs="+", type=Path, metavar="BASE_PATH", help="folder of versions, or of such folders"
    )
    deploy.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="where to write")
    deploy.add_argument("--replace", action="store_true", help="replace a kit that is there")
    deploy.add_argument("--model-name", metavar="NAME", help="of one model; by default the folder's name")
    deploy.add_argument(
        "--versions", nargs="+", type=int, default=[], metavar="N", help="of one model; default: newest"
    )
    deploy.add_argument("--label", action="append", default=[], metavar="LABEL=N", help="of one model; may be repeated")
    deploy.add_argument("--max-batch-size", type=int, default=defaults.max_batch_size, metavar="N")
    deploy.add_argument("--cpus", type=int, default=defaults.cpus, metavar="N", help="CPU cores of one server")
    deploy.add_argument("--replicas", type=int, default=defaults.replicas, metavar="N", help="servers in Kubernetes")
    deploy.add_argument("--volume-claim", default=defaults.volume_claim, metavar="NAME", help="volume in Kubernetes")
    deploy.set_defaults(run=_deploy)


def _add_rollout(commands) -> None:
    rollout = _command(commands, "rollout", "Move the labels stable and canary to other versions.", ROLLOUT)
    rollout.add_argument("base_path", type=Path, metavar="BASE_PATH", help="folder of the model's versions")
    rollout.add_argument("--model-name", required=True, metavar="NAME")
    which = rollout.add_mutually_exclusive_group(required=True)
    which.add_argument("--stable", type=int, metavar="N", help="the version most requests ask for")
    which.add_argument("--promote", action="store_true", help="make the canary stable")
    rollout.add_argument("--canary", type=int, metavar="N", help="the version to try")
    rollout.add_argument("--config", type=Path, metavar="FILE", help=f"default: BASE_PATH/{CONFIG_FILE}")
    rollout.add_argument("--address", metavar="HOST:PORT", help="gRPC API of a running server")
    rollout.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds to load; default 600")
    rollout.set_defaults(run=_rollout)


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


def _deploy(options: argparse.Namespace) -> int:
    from serving.production.kit import write_production_kit

    files = write_production_kit(
        options.paths,
        options.output,
        model_name=options.model_name,
        versions=options.versions,
        labels=dict(_label(text) for text in options.label),
        replace=options.replace,
        options=KitOptions(
            max_batch_size=options.max_batch_size,
            num_batch_threads=options.cpus,
            cpus=options.cpus,
            replicas=options.replicas,
            volume_claim=options.volume_claim,
        ),
    )
    print("\n".join(map(str, files)))
    return 0


def _label(text: str) -> tuple[str, int]:
    label, separator, version = text.partition("=")
    if not (label and separator and version.isdecimal()):
        raise ServingError(f"{text!r} is not a label: write it as LABEL=VERSION, such as stable=3.")
    return label, int(version)


def _rollout(options: argparse.Namespace) -> int:
    # TensorFlow comes with it, which `deploy` and `--help` need not wait for.
    from serving.production.rollout import roll_out

    if options.promote and options.canary is not None:
        raise ServingError("--promote makes the canary stable: name a new canary afterwards.")
    config_file = options.config or options.base_path / CONFIG_FILE
    plan = roll_out(
        config_file,
        options.base_path,
        options.model_name,
        stable=options.stable,
        canary=options.canary,
        address=options.address,
        timeout_seconds=options.timeout,
    )
    labels = next(model.labels for model in plan.final if model.name == options.model_name)
    where = options.address or "the file only; restart the server, or give --address"
    print(f"{options.model_name}: {', '.join(f'{label} {version}' for label, version in labels.items())} ({where})")
    print(config_file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
