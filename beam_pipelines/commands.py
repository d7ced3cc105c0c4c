"""The commands of `python -m beam_pipelines` that turn images of users into client datasets, and what jobs share."""

import argparse
import dataclasses
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WIDTH = 100
_EXCHANGES = ("files", "runner")
_EPILOG = """\
flags that are not listed here go to Beam, for example:
  --direct_num_workers=2 --direct_running_mode=multi_processing

example:
  python -m beam_pipelines {example} --output data/clients
"""
# What a command does with its parsed options and the flags for Beam: returns a text to print.
Run = Callable[[argparse.Namespace, tuple[str, ...]], str]


def add_image_commands(jobs: Any) -> None:
    """Adds `femnist`, `nist`, `celeba` and `fed-emnist` to what `ArgumentParser.add_subparsers` returned.

    Parsed options have `run`, a `Run`, which raises `tff_pdp.errors.UserError` for what the user can mend. Defaults
    repeat those of the dataclasses of options, as these start Beam; a test compares them.
    """
    femnist = add_command(
        jobs,
        "femnist",
        "LEAF FEMNIST JSON -> client dataset",
        "Reads every LEAF JSON file of a folder, splits each client's examples into train, validation and test, and "
        "writes TFRecord shards from which any one client can be read. Where the folder has LEAF's folders train and "
        "test, those say which examples are test examples.",
        example="--input data/all_data",
        run=_femnist,
    )
    add_job_arguments(femnist, "folder of LEAF files, .json or .json.gz, or of its folders train and test")
    add_client_arguments(femnist, (28, 28, 1))
    femnist.add_argument("--num_classes", type=int, default=62, metavar="N", help="labels are 0..N-1; default 62")

    nist = add_command(
        jobs,
        "nist",
        "NIST SD19 PNG files -> client dataset",
        "Joins NIST SD19's images by writer with those by class, as LEAF does, and makes a client of every writer.",
        example="--input data/raw",
        run=_nist,
    )
    add_job_arguments(nist, "folder of by_class and by_write")
    add_client_arguments(nist, (28, 28, 1))
    nist.add_argument(
        "--classes",
        default="all",
        choices=("all", "digits", "letters", "merged"),
        help="62 classes, 10, 52, or 47 with letters merged that look alike in both cases; default all",
    )

    celeba = add_command(
        jobs,
        "celeba",
        "CelebA -> client dataset",
        "Makes a client of every person of CelebA, from its text files or from LEAF's JSON, and its JPEGs.",
        example="--input data/celeba",
        run=_celeba,
    )
    add_job_arguments(celeba, "folder of identity_CelebA.txt and list_attr_celeba.txt, or of LEAF files")
    add_client_arguments(celeba, (84, 84, 3))
    celeba.add_argument("--attribute", default="Smiling", metavar="NAME", help="label 1 means it; default Smiling")
    celeba.add_argument(
        "--split",
        default="random",
        choices=("random", "by_image_partition"),
        help="by_image_partition: as list_eval_partition.txt, in which no person is on two sides; default random",
    )
    celeba.add_argument("--images", metavar="DIR", help="folder of JPEGs; default img_align_celeba in or beside PATH")

    fed_emnist = add_command(
        jobs,
        "fed-emnist",
        "TFF's Federated EMNIST -> client dataset",
        "Reads TensorFlow Federated's database of handwriting, whose test examples stay test examples.",
        example="--input emnist_all.sqlite.lzma",
        run=_fed_emnist,
    )
    add_job_arguments(fed_emnist, "emnist_all.sqlite, emnist_all.sqlite.lzma, or a folder of the older .h5 files")
    add_client_arguments(fed_emnist, (28, 28, 1))
    fed_emnist.add_argument("--num_classes", type=int, default=62, choices=(10, 62), help="10 are digits; default 62")


def add_command(
    jobs: Any, name: str, help_text: str, description: str, *, example: str, run: Run
) -> argparse.ArgumentParser:
    """Adds a command without arguments, which passes flags that it does not know on to Beam."""
    parser = jobs.add_parser(
        name,
        help=help_text,
        description=textwrap.fill(description, _WIDTH),
        epilog=_EPILOG.format(example=f"{name} {example}"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_job_arguments(parser: argparse.ArgumentParser, input_help: str) -> None:
    """Adds what `beam_pipelines.job.JobOptions` has."""
    add = parser.add_argument
    add("--input", required=True, metavar="PATH", help=input_help)
    add("--output", required=True, metavar="DIR", help="folder to write; complete only once it holds _SUCCESS")
    add("--seed", type=int, default=0, metavar="N", help="keys the split; same seed, same bytes; default 0")
    add("--max_bad_fraction", type=float, default=0.01, metavar="F", help="fail above this bad share; default 0.01")
    add("--dead_letters", metavar="DIR", help="where a failing job keeps bad records; default OUTPUT.dead_letters")
    add("--overwrite", action="store_true", help="replace a dataset that was prepared differently")
    exchange_help = "files: bounded memory, resumable; runner: one pipeline, for clusters; default files"
    add("--exchange", default="files", choices=_EXCHANGES, help=exchange_help)
    add("--runner", default="FnApiRunner", metavar="NAME", help="Beam runner; default FnApiRunner (in this process)")


def add_client_arguments(parser: argparse.ArgumentParser, shape: tuple[int, ...]) -> None:
    """Adds what `beam_pipelines.client_dataset_job.ClientDatasetOptions` has besides, for images."""
    add = parser.add_argument
    shape_help = f"default {' '.join(map(str, shape))}"
    add("--input_shape", type=int, nargs=3, default=shape, metavar=("H", "W", "C"), help=shape_help)
    add("--test_fraction", type=float, default=0.2, metavar="F", help="expected share of test examples; default 0.2")
    add("--validation_fraction", type=float, default=0.2, metavar="F", help="the same for validation; default 0.2")
    add("--exact_split", action="store_true", help="make each client's shares exact, rounded up to whole examples")
    add("--split_by", default="sample", choices=("sample", "user"), help="divide examples of each client, or clients")
    add("--min_examples_per_client", type=int, default=10, metavar="N", help="smaller clients are dropped; default 10")
    add("--num_shards", type=int, default=8, metavar="N", help="shard files; one must fit a worker's memory; default 8")


def build_options(kind: type, options: argparse.Namespace, pipeline_args: tuple[str, ...], **others: Any) -> Any:
    """Builds a dataclass of job options from parsed ones of the same names; `others` go first."""
    names = {field.name for field in dataclasses.fields(kind)} - {"pipeline_args"}
    parsed = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items()}
    return kind(**{name: parsed[name] for name in names & parsed.keys()} | others, pipeline_args=pipeline_args)


# Beam takes seconds to start, and `--help` should not: what needs it is imported where a job is run.


def _femnist(options: argparse.Namespace, pipeline_args: tuple[str, ...]) -> str:
    from beam_pipelines.femnist import FemnistOptions, run_femnist

    return run_femnist(build_options(FemnistOptions, options, pipeline_args)).table()


def _nist(options: argparse.Namespace, pipeline_args: tuple[str, ...]) -> str:
    from beam_pipelines.nist import num_nist_classes
    from beam_pipelines.sources.user_builders import build_nist_sd19

    num_classes = num_nist_classes(options.classes)
    return _prepare(build_nist_sd19, num_classes, options, pipeline_args, classes=options.classes)


def _celeba(options: argparse.Namespace, pipeline_args: tuple[str, ...]) -> str:
    from beam_pipelines.sources.celeba import CELEBA_CLASSES
    from beam_pipelines.sources.user_builders import build_celeba

    arguments = {name: getattr(options, name) for name in ("attribute", "split", "images")}
    return _prepare(build_celeba, CELEBA_CLASSES, options, pipeline_args, **arguments)


def _fed_emnist(options: argparse.Namespace, pipeline_args: tuple[str, ...]) -> str:
    from beam_pipelines.sources.user_builders import build_fed_emnist

    return _prepare(build_fed_emnist, options.num_classes, options, pipeline_args)


def _prepare(
    build: Callable[..., Any],
    num_classes: int,
    options: argparse.Namespace,
    pipeline_args: tuple[str, ...],
    **arguments: Any,
) -> str:
    """Prepares raw data that a function of `tff_pdp.registry.DATASETS` describes."""
    from beam_pipelines.client_dataset_job import ClientDatasetOptions, run_client_dataset_job
    from tff_pdp.experiment.config import DataConfig

    job = build_options(ClientDatasetOptions, options, pipeline_args, num_classes=num_classes)
    source = build.__name__.removeprefix("build_")
    data = DataConfig(str(job.input), source, input_shape=job.input_shape, num_classes=num_classes)
    output = Path(job.output).absolute()
    workspace = output.with_name(f".{output.name}.raw")
    try:
        return run_client_dataset_job(build(data, workspace, **arguments), job).table()
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
