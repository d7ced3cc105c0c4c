"""The command line: prepare, train, tune, evaluate, export, personalize, verify, seal, serve, predict, demo and more.

Nothing heavy is imported here: TensorFlow and TFF take many seconds, and `--help` should not.
"""

import argparse
import sys
from collections.abc import Sequence

from tff_pdp import __version__
from tff_pdp.commands import account as account_command
from tff_pdp.commands import record as record_commands
from tff_pdp.errors import UserError, sentence_for_user
from tff_pdp.reproduce.setting import NAMES

DESCRIPTION = """\
Personalised, differentially private federated learning: from raw client data to personal models behind
TensorFlow Serving.

A whole experiment, in the order data flows:
  tff-pdp prepare  --config demo                 raw LEAF JSON -> client dataset
  tff-pdp train    --config demo                 client dataset -> personal models and a privacy ledger
  tff-pdp evaluate --config demo                 test metrics, report.html, summary.json
  tff-pdp export   --config demo                 personal models -> one SavedModel
  tff-pdp serve    --model-base-path runs/demo/export/digits
  tff-pdp predict  --config demo --client-id silo_03 --address localhost:8501
  tff-pdp verify   runs/demo                     digests, chains, and epsilon computed anew, off line
  tff-pdp seal     runs/demo                     the key of the noise is destroyed, the record stays

`tff-pdp demo` does all of it on 1,797 real digits. `tff-pdp COMMAND --help` explains one command.
"""

CONFIG = "an experiment: a YAML file, or the name of one that comes with tff_pdp, such as demo or reproduce/school"
RAW_DATA = """\
the experiment's data.kind says what its data.input is:
  leaf                   a folder of LEAF JSON of images, or with its train and test
  silo_files             feature vectors of silos: .mat, LEAF-like .json, .npz
  mnist_writers          MNIST's idx.gz files and QMNIST's table of their 539 writers
  fed_emnist             TFF's emnist_all.sqlite[.lzma], or its older .h5 files
  nist_sd19              NIST SD19's by_class and by_write, by writer: raw FEMNIST
  celeba                 CelebA's text files or LEAF's JSON, and img_align_celeba, by person
  rotated_mnist          MNIST's four idx.gz files, to be divided among silos, rotated and masked
  partitioned_images     CIFAR-10/100, MNIST or EMNIST, to be divided among clients
  contact_graph          a population's tables (US/UK PETs pandemic challenge): people and whom they met
  simulated_outbreak     the same, of an outbreak simulated first; SocioPatterns' tij_*.dat, or generated
options of a kind stand beside it in data; the classes that tff_pdp/experiment/kinds.py names explain them, and
module:name is a kind of one's own
"""

TUNING = """\
every silo trains a secret, random number of candidates by itself, against one run of all silos, and releases the best;
the cost is part of epsilon. docs/privacy.md explains it. For what follows, write the search into the experiment:
  tuning:
    search: {algorithm: mr_mtl, values: {prox_weight: [0.1, 1, 10]}, runs: geometric, mean_runs: 5}
then tff-pdp evaluate and tff-pdp export treat the result as a trained method
"""


PERSONALIZE = """\
only what clients own is fitted, from the global model's: the head, a descriptor of a hypernetwork, or the choice of a
cluster. The result is the next version of the export, which running servers take up. Silos whose examples are protected
pay for it, each from a budget of its own, on record in the experiment's folder; docs/privacy.md explains it
"""

SERVING = """\
for development, tests and demonstrations: no password, no encryption. It answers as TensorFlow Serving, which is for
production; metrics for Prometheus are at /monitoring/prometheus/metrics of the REST port. Ctrl-C or SIGTERM ends it
once running requests are answered
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 for success, 2 for a problem the user can mend."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (UserError, OSError) as error:
        sentence = sentence_for_user(error)
        if sentence is None:
            raise
        print(f"tff-pdp {options.command}: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"tff-pdp {options.command}: stopped", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tff-pdp", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"tff-pdp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    prepare = _command(commands, "prepare", "Turn raw client data into a client dataset (an Apache Beam job).")
    prepare.epilog = RAW_DATA
    _add_config(prepare)
    prepare.add_argument("--overwrite", action="store_true", help="replace a client dataset prepared differently")
    prepare.set_defaults(run=_lazily("prepare"))

    train = _command(commands, "train", "Train the experiment's methods, each silo under its own privacy budget.")
    _add_config(train)
    _add_engine(train)
    _add_algorithms(train)
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    train.add_argument("--overwrite", action="store_true", help="start again where a run exists")
    train.set_defaults(run=_lazily("train"))

    tune = _command(commands, "tune", "Search hyper-parameters of one method privately, within each silo's budget.")
    tune.epilog = TUNING
    _add_config(tune)
    _add_engine(tune)
    tune.add_argument("--algorithm", metavar="NAME", help="the method to search; default: tuning.search.algorithm")
    tune.add_argument(
        "--values",
        action="append",
        default=[],
        metavar="NAME=NUMBERS",
        help="values to try: --values prox_weight=0.1,1,10; may be repeated; default: tuning.search.values",
    )
    tune.add_argument(
        "--runs",
        metavar="HOW",
        help="distribution of the number of runs: geometric (default), logarithmic, poisson, a shape; or fixed: each "
        "candidate once",
    )
    tune.add_argument("--mean-runs", type=float, metavar="N", help="expected number of runs of each silo, above 1")
    tune.add_argument("--resume", action="store_true", help="continue a search that was stopped")
    tune.add_argument("--overwrite", action="store_true", help="start again where a run exists")
    tune.set_defaults(run=_lazily("tune"))

    evaluate = _command(commands, "evaluate", "Test the personal models; write report.html and summary.json.")
    _add_config(evaluate)
    _add_engine(evaluate)
    _add_algorithms(evaluate)
    evaluate.set_defaults(run=_lazily("evaluate"))

    config = _command(commands, "config", "Check an experiment's file and show its defaults; or describe all keys.")
    what = config.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE", help=f"checked as commands check it: {CONFIG}")
    what.add_argument("--schema", action="store_true", help="all keys as JSON Schema, for editors")
    what.add_argument("--reference", action="store_true", help="all keys as the page docs/configuration.md")
    config.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of train")
    config.set_defaults(run=_lazily("config"))

    account = _command(commands, "account", "Compute an epsilon, or the noise that an epsilon needs.")
    account_command.add_arguments(account)
    account.set_defaults(run=account_command.run)

    export = _command(commands, "export", "Write the personal models as one SavedModel for TensorFlow Serving.")
    _add_config(export)
    _add_engine(export)
    export.add_argument(
        "--drop-added", action="store_true", help="leave out clients that were added to the newest version"
    )
    export.set_defaults(run=_lazily("export"))

    personalize = _command(commands, "personalize", "Add clients to the export, fitted to their own examples.")
    personalize.epilog = PERSONALIZE
    _add_config(personalize)
    _add_personalize(personalize)
    personalize.set_defaults(run=_lazily("personalize"))

    verify = _command(commands, "verify", "Check a run's files and records, and compute its epsilon anew.")
    record_commands.add_verify_arguments(verify)
    verify.set_defaults(run=record_commands.verify)

    seal = _command(commands, "seal", "Destroy the key and the states of a run that is done; keep its record.")
    record_commands.add_seal_arguments(seal)
    seal.set_defaults(run=record_commands.seal)

    serve = _command(commands, "serve", "Serve an export on this machine, speaking TensorFlow Serving's protocols.")
    _add_serve(serve)
    serve.set_defaults(run=_lazily("serve"))

    predict = _command(commands, "predict", "Ask a server for predictions on some of a client's test examples.")
    _add_config(predict)
    predict.add_argument("--client-id", required=True, metavar="ID", help="whose personal model; unknown: the global")
    predict.add_argument("--examples-of", metavar="ID", help="whose test examples to send; default: the same client")
    predict.add_argument("--num-examples", type=int, default=3, metavar="N", help="how many; default 3")
    predict.add_argument("--address", default="localhost:8501", metavar="HOST:PORT", help="default localhost:8501")
    predict.add_argument("--grpc", action="store_true", help="speak gRPC; the address is then the gRPC port's")
    predict.set_defaults(run=_lazily("predict"))

    demo = _command(commands, "demo", "Everything at once, on real digits or on your own FEMNIST folder.")
    demo.add_argument("--data", metavar="DIR", help="folder of LEAF FEMNIST JSON; default: scikit-learn's digits")
    demo.add_argument("--output", default="runs/demo", metavar="DIR", help="default runs/demo; replaced if it exists")
    _add_engine(demo)
    _add_json(demo)
    demo.set_defaults(run=_lazily("demo"))

    reproduce = _command(commands, "reproduce", "Repeat an experiment: methods x privacy budgets x seeds.")
    _add_reproduce(reproduce)
    _add_json(reproduce)
    reproduce.set_defaults(run=_lazily("reproduce"))

    doctor = _command(commands, "doctor", "Show versions and devices, and test the engines on each device.")
    _add_json(doctor)
    doctor.set_defaults(run=_lazily("doctor"))
    return parser


def _command(commands: argparse._SubParsersAction, name: str, summary: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help=CONFIG)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one value of the experiment, by dotted key: --set training.rounds=10; may be repeated",
    )
    _add_json(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", metavar="NAME", help="inprocess (default), or native: TFF's C++ worker")
    parser.add_argument("--device", metavar="NAME", help="cpu, gpu, gpu:N, or auto (default): a GPU where there is one")
    parser.add_argument(
        "--client-parallelism",
        metavar="MODE",
        help="loop: a call for each client; vectorized: one for many; auto (default): times both and keeps the faster",
    )
    parser.add_argument(
        "--clients-per-call", type=int, metavar="N", help="most clients computed at a time; bounds memory"
    )


def _add_algorithms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algorithm", action="append", metavar="NAME", help="one method of the experiment; default: all of them"
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.epilog = SERVING
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model-base-path", metavar="DIR", help="folder with numbered version folders")
    what.add_argument(
        "--model-config-file", metavar="FILE", help="several models: TensorFlow Serving's models.config, as text"
    )
    parser.add_argument("--model-name", metavar="NAME", help="name in requests; default: the folder's name")
    parser.add_argument("--rest-port", type=int, default=8501, metavar="PORT", help="default 8501; 0 picks a free one")
    parser.add_argument("--grpc-port", type=int, default=8500, metavar="PORT", help="default 8500; 0 picks a free one")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default 127.0.0.1: this machine only")
    parser.add_argument(
        "--poll-seconds",
        type=float,
        default=1.0,
        metavar="N",
        help="how often to look for new versions; default 1; 0: only at the start",
    )
    batching = parser.add_mutually_exclusive_group()
    batching.add_argument(
        "--batching-parameters-file", metavar="FILE", help="how waiting requests are merged; TensorFlow Serving's file"
    )
    batching.add_argument("--no-batching", action="store_true", help="run each request on its own")
    parser.add_argument(
        "--max-bytes", type=int, default=64 * 2**20, metavar="N", help="largest request; default 67108864 (64 MiB)"
    )
    parser.add_argument(
        "--max-elements", type=int, default=16 * 2**20, metavar="N", help="largest gRPC tensor; default 16777216"
    )


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", choices=NAMES, help="which experiment")
    parser.add_argument("--paper", action="store_true", help="with the paper's choices, unsound ones included")
    parser.add_argument("--scale", choices=("small", "full"), help="full is the paper's; small runs on two cores")
    parser.add_argument("--methods", nargs="+", action="extend", metavar="NAME", help="default: those of the scale")
    parser.add_argument(
        "--epsilons", nargs="+", action="extend", metavar="E", help="of every silo or user; inf: no privacy"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="repetitions; default: those of the scale")
    parser.add_argument(
        "--variants", nargs="+", action="extend", metavar="NAME", help="such as default, silo_scaling, classes_2"
    )
    parser.add_argument("--grid", type=float, nargs="*", metavar="LAMBDA", help="sweep lambda too; default: its grid")
    parser.add_argument("--data", metavar="DIR", help="folder of the raw data; default: $TFF_PDP_DATA")
    parser.add_argument("--output", metavar="DIR", help="default runs/reproduce/SETTING; a stopped sweep goes on there")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; default: one a core")


def _add_personalize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--examples",
        required=True,
        metavar="PATH",
        help="an .npz file with x and y of one client, or a client dataset, whose held-out examples are reported on",
    )
    parser.add_argument(
        "--client-id", action="append", default=[], metavar="ID", help="whose; default: all of a client dataset"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="gradient steps; default 100")
    parser.add_argument("--learning-rate", type=float, metavar="R", help="default: that of training")
    parser.add_argument("--batch-size", type=int, metavar="B", help="default: privacy.batch_size")
    parser.add_argument("--clip-norm", type=float, metavar="C", help="of protected silos; default: privacy.clip_norm")
    parser.add_argument("--epsilon", type=float, metavar="E", help="budget of each protected silo for this fit")
    parser.add_argument("--delta", type=float, metavar="D", help="of the same; below 1 / number of its examples")
    parser.add_argument("--replace", action="store_true", help="fit clients again that are in the export already")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object on standard output")


def _lazily(name: str):
    """Imports a command's module only when the command runs."""

    def run(options: argparse.Namespace) -> int:
        from tff_pdp.commands import experiment as commands

        return getattr(commands, name)(options)

    return run


if __name__ == "__main__":
    sys.exit(main())
