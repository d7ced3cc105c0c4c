"""The command line: prepare, train, tune, evaluate, account, export, serve, predict, demo, reproduce, doctor.

Nothing heavy is imported here: TensorFlow and TFF take many seconds, and `--help` should not.
"""

import argparse
import sys
from collections.abc import Sequence

from tff_pdp import __version__, account_command
from tff_pdp.errors import UserError
from tff_pdp.reproduce.settings import SETTINGS

DESCRIPTION = """\
Personalised, differentially private federated learning: from raw client data to personal models behind
TensorFlow Serving.

A whole experiment, in the order data flows:
  tff-pdp prepare  --config configs/demo.yaml    raw LEAF JSON -> client dataset
  tff-pdp train    --config configs/demo.yaml    client dataset -> personal models and a privacy ledger
  tff-pdp evaluate --config configs/demo.yaml    test metrics, report.html, summary.json
  tff-pdp export   --config configs/demo.yaml    personal models -> one SavedModel
  tff-pdp serve    --model-base-path runs/demo/export/digits
  tff-pdp predict  --config configs/demo.yaml --client-id silo_03 --address localhost:8501

`tff-pdp demo` does all of it on 1,797 real digits. `tff-pdp COMMAND --help` explains one command.
"""

RAW_DATA = """\
the experiment's data.source says what its data.input is:
  leaf                   a folder of LEAF JSON of images, or with its train and test (the default)
  silo_files             feature vectors of silos: .mat, LEAF-like .json, .npz
  mnist_writers          MNIST's idx.gz files and QMNIST's table of their 539 writers
  fed_emnist             TFF's emnist_all.sqlite[.lzma], or its older .h5 files
  nist_sd19              NIST SD19's by_class and by_write, by writer: raw FEMNIST
  celeba                 CelebA's text files or LEAF's JSON, and img_align_celeba, by person
  rotated_mnist          MNIST's four idx.gz files, to be divided among silos, rotated and masked
  partitioned_images     CIFAR-10/100, MNIST or EMNIST, to be divided among clients
  contact_graph          a population's tables (US/UK PETs pandemic challenge): people and whom they met
  simulated_outbreak     the same, of an outbreak simulated first; SocioPatterns' tij_*.dat, or generated
options of a source go under data.arguments; tff_pdp/data/{,user_,graph_}datasets.py explain them
"""

TUNING = """\
every silo trains a secret, random number of candidates by itself, against one run of all silos, and releases the best;
the cost is part of epsilon. docs/privacy.md explains it. For what follows, write the search into the experiment:
  tuning:
    search: {algorithm: mr_mtl, values: {prox_weight: [0.1, 1, 10]}, runs: geometric, mean_runs: 5}
then tff-pdp evaluate and tff-pdp export treat the result as a trained method
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 for success, 2 for a problem the user can mend."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except UserError as error:
        print(f"tff-pdp {options.command}: {error}", file=sys.stderr)
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

    account = _command(commands, "account", "Compute an epsilon, or the noise that an epsilon needs.")
    account_command.add_arguments(account)
    account.set_defaults(run=account_command.run)

    export = _command(commands, "export", "Write the personal models as one SavedModel for TensorFlow Serving.")
    _add_config(export)
    _add_engine(export)
    export.set_defaults(run=_lazily("export"))

    serve = _command(commands, "serve", "Serve an export on this machine, speaking TensorFlow Serving's protocols.")
    serve.add_argument("--model-base-path", required=True, metavar="DIR", help="folder with numbered version folders")
    serve.add_argument("--model-name", metavar="NAME", help="name in requests; default: the folder's name")
    serve.add_argument("--rest-port", type=int, default=8501, metavar="PORT", help="default 8501; 0 picks a free one")
    serve.add_argument("--grpc-port", type=int, default=8500, metavar="PORT", help="default 8500; 0 picks a free one")
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
    parser.add_argument("--config", required=True, metavar="FILE", help="the experiment, a YAML file; see configs/")
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


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", choices=tuple(SETTINGS), help="which experiment")
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


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object on standard output")


def _lazily(name: str):
    """Imports a command's module only when the command runs."""

    def run(options: argparse.Namespace) -> int:
        from tff_pdp import commands

        return getattr(commands, name)(options)

    return run


if __name__ == "__main__":
    sys.exit(main())
