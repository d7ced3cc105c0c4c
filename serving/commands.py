"""The command line of production: `serving deploy` writes a kit, `serving rollout` moves labels."""

import argparse
from pathlib import Path

from serving.production.containers import KitOptions
from serving.tf_serving import CONFIG_FILE
from tff_pdp.errors import ServingError

_DEPLOY = """\
writes into FOLDER what TensorFlow Serving needs: models.config with every model that has a complete version,
batching and monitoring parameters, a Compose file, Kubernetes manifests, and a README with the commands
"""

_ROLLOUT = """\
serves two versions of a model under the labels stable and canary, or makes the canary stable:
  serving rollout runs/x/export/digits --model-name digits --stable 3 --canary 4 --address 127.0.0.1:8500
  serving rollout runs/x/export/digits --model-name digits --promote --address 127.0.0.1:8500
  serving rollout runs/x/export/digits --model-name digits --stable 3      # back to the old version
with an address, the server loads the versions first and moves the labels then; models.config is written last, and
where the server fails on the way it is sent the list of before again
"""


def add_commands(commands) -> None:
    """Adds `deploy` and `rollout` to the subparsers of a command line."""
    _add_deploy(commands)
    _add_rollout(commands)


def _add_deploy(commands) -> None:
    defaults = KitOptions()
    deploy = commands.add_parser(
        "deploy",
        help="Write the files that TensorFlow Serving needs in production.",
        epilog=_DEPLOY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    rollout = commands.add_parser(
        "rollout",
        help="Move the labels stable and canary to other versions.",
        epilog=_ROLLOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
