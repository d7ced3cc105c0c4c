"""Defines the commands of `python -m beam_pipelines`: jobs on images and on contact graphs, and populations made up."""

import argparse
import dataclasses
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beam_pipelines.contact_graph.rows import LAYOUTS
from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, FORMATS
from beam_pipelines.options import RawData
from tff_pdp.settings import Settings, read_settings

if TYPE_CHECKING:
    from beam_pipelines.options import SourceSettings

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
    """Adds what `beam_pipelines.dataset.job.JobOptions` has."""
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
    """Adds what `beam_pipelines.dataset.clients.ClientDatasetOptions` has besides, for images."""
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
    from beam_pipelines.sources.leaf import Leaf

    return _prepare(Leaf, "leaf", options, pipeline_args, num_classes=options.num_classes)


def _nist(options: argparse.Namespace, pipeline_args: tuple[str, ...]) -> str:
    from beam_pipelines.sources.nist import NistSd19, num_nist_classes

    num_classes = num_nist_classes(options.classes)
    return _prepare(NistSd19, "nist_sd19", options, pipeline_args, num_classes=num_classes, classes=options.classes)


def _celeba(options: argparse.Namespace, pipeline_args: tuple[str, ...]) -> str:
    from beam_pipelines.sources.celeba import Celeba

    own = {name: getattr(options, name) for name in ("attribute", "split", "images")}
    return _prepare(Celeba, "celeba", options, pipeline_args, num_classes=2, **own)


def _fed_emnist(options: argparse.Namespace, pipeline_args: tuple[str, ...]) -> str:
    from beam_pipelines.sources.fed_emnist import FedEmnist

    return _prepare(FedEmnist, "fed_emnist", options, pipeline_args, num_classes=options.num_classes)


def _prepare(
    source: type["SourceSettings"],
    kind: str,
    options: argparse.Namespace,
    pipeline_args: tuple[str, ...],
    *,
    num_classes: int,
    **own: Any,
) -> str:
    """Prepares raw data of a kind."""
    from beam_pipelines.dataset.clients import run_client_dataset_job
    from beam_pipelines.options import ClientDatasetOptions

    job = build_options(ClientDatasetOptions, options, pipeline_args, num_classes=num_classes)
    content = {"kind": kind, "input": str(job.input), "input_shape": job.input_shape, "num_classes": num_classes}
    settings = read_settings(source, {**content, **own}, "the command line")
    output = Path(job.output).absolute()
    workspace = output.with_name(f".{output.name}.raw")
    try:
        raw = settings.build(workspace)
        assert isinstance(raw, RawData)
        return run_client_dataset_job(raw, job).table()
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


_DEGREE_BOUNDS = ("promise", "public_groups", "edge")


def add_contact_graph_command(jobs: Any) -> None:
    """Adds the command to what `ArgumentParser.add_subparsers` returned; see `beam_pipelines.commands`."""
    parser = add_command(
        jobs,
        "contact-graph",
        "people, contacts and an outbreak (PETs tables) -> client dataset",
        "Makes a row of every person: own features, those of sampled contacts with the history of the disease, and "
        "whether the person falls ill. Clients are silos, such as regions. The manifest says how many rows one person "
        "can change, which training's privacy plan (contact_graph) takes from there.",
        example="--input data/virginia --degree_bound promise --max_degree 20",
        run=_run,
    )
    add_job_arguments(parser, "folder of the tables: person, population_network, disease_outcome_training, ...")
    add = parser.add_argument
    add(
        "--degree_bound",
        required=True,
        choices=_DEGREE_BOUNDS,
        help="promise: nobody has met more than --max_degree people; public_groups: contacts outside of groups by "
        "--group_column are left out; edge: protects contacts, not people",
    )
    add("--max_degree", type=int, metavar="D", help="of promise: different people met, a public constant")
    add(
        "--adjacency",
        choices=("replace_one", "replace_special"),
        help="of promise: a person becomes another one (2 D + 1 rows), or is left out (D + 1); default replace_one",
    )
    add("--group_column", metavar="TABLE.COLUMN", help="of public_groups: person.<column> or household.<column>")
    add("--max_group_size", type=int, metavar="B", help="of public_groups: people in the largest group")
    add(
        "--silo_by",
        default="person.region",
        metavar="WHAT",
        help="person.<column>, household.<column> or residence_grid.<degrees>; default person.region",
    )
    add("--num_slots", type=int, default=20, metavar="S", help="contacts that a row looks at; default 20")
    add(
        "--layout",
        default="slots",
        choices=LAYOUTS,
        help="slots: numbers for each contact; summary: their mean, a tenth as many; exposure: ten; default slots",
    )
    add("--num_days", type=int, default=57, metavar="N", help="observed days, from day 0; default 57")
    add("--window_days", type=int, default=21, metavar="N", help="of history in a row; default 21")
    add("--prediction_days", type=int, default=7, metavar="N", help="how far ahead the label looks; default 7")
    add("--num_windows", type=int, default=1, metavar="N", help="rows of each person for training; default 1")
    add("--validation_fraction", type=float, default=0.1, metavar="F", help="expected share of people; default 0.1")
    add("--min_people_per_silo", type=int, default=10, metavar="N", help="smaller silos are dropped; default 10")
    add("--num_shards", type=int, default=0, metavar="N", help="shard files; default one for 2 million contacts")


def _run(options: argparse.Namespace, pipeline_args: tuple[str, ...]) -> str:
    # Imported late: Beam takes seconds to start, and `--help` should not.
    from beam_pipelines.contact_graph.degree import DegreeBound
    from beam_pipelines.contact_graph.job import ContactGraphOptions, run_contact_graph_job

    keys = ("max_degree", "adjacency", "group_column", "max_group_size")
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    bound = read_settings(DegreeBound, {"kind": options.degree_bound, **given}, "the command line", "degree_bound")
    return run_contact_graph_job(build_options(ContactGraphOptions, options, pipeline_args, degree_bound=bound)).table()


def add_epidemic_commands(jobs: Any) -> None:
    """Adds the commands to what `ArgumentParser.add_subparsers` returned.

    Parsed options have `run`, a function of them and of flags that are not known, which it refuses: Beam has no part in
    this. It returns a summary to print, and raises `tff_pdp.errors.UserError` for what the user can mend.
    """
    _add_generate(jobs)
    _add_simulate(jobs)
    _add_import(jobs)


def _add_generate(jobs: Any) -> None:
    description = (
        "Makes up people with households, schools and workplaces, and whom they meet, as the tables of the PETs "
        "pandemic challenge: for demos, tests and benchmarks, not as an estimate for any country."
    )
    parser = _add_command(
        jobs, "generate-population", "made-up people and contacts (PETs tables)", description, _generate
    )
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="DIR", help="folder to write")
    add("--num_people", required=True, type=int, metavar="N", help="how many people")
    add(
        "--contact_rows_per_person",
        type=float,
        default=24.5,
        metavar="X",
        help="rows of population_network divided by people; each row has two people; default 24.5",
    )
    add("--num_regions", type=int, default=4, metavar="N", help="values of person.region; default 4")
    add("--max_contacts", type=int, metavar="N", help="nobody meets more different people than this; default no bound")
    add("--community_size", type=int, default=50_000, metavar="N", help="at most; memory grows with it; default 50000")
    add("--no_assignments", action="store_true", help="leave out activity_location_assignment (3 rows a person)")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same tables; default 0")
    _add_table_format(parser)


def _add_simulate(jobs: Any) -> None:
    description = (
        "Simulates an outbreak on the tables person and population_network, day by day, and writes "
        "disease_outcome_training (states of the observed days) and target (infected in the days after)."
    )
    parser = _add_command(jobs, "simulate-outbreak", "an outbreak on a population's contacts", description, _simulate)
    add = parser.add_argument
    add("--input", required=True, type=Path, metavar="DIR", help="folder of the population's tables")
    add("--output", type=Path, metavar="DIR", help="folder to write; default the population's own")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same outbreak; default 0")
    add(
        "--initial_infections", type=int, metavar="N", help="people infected on day 0; default one in 5,000, at least 5"
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--reproduction_number",
        type=float,
        default=2.0,
        metavar="X",
        help="people infected by someone of mean contact hours if nobody is immune, roughly; default 2",
    )
    rate.add_argument("--transmission_rate", type=float, metavar="X", help="infections per hour of contact, instead")
    add("--infectious_days", type=float, default=7.0, metavar="X", help="mean days until recovery; default 7")
    add("--fixed_duration", action="store_true", help="recover after exactly that many days")
    add("--observed_days", type=int, default=57, metavar="N", help="days with known states; default 57")
    add("--target_days", type=int, default=7, metavar="N", help="days to forecast; default 7")
    add("--sparse", action="store_true", help="leave out rows of state S; a person without a row on a day is in it")
    _add_table_format(parser)


def _add_import(jobs: Any) -> None:
    description = (
        "Reads face-to-face contacts of a SocioPatterns study (tij_*.dat or .dat.gz: rows `t i j`) and writes the "
        "tables person, household and population_network. Ages are not known and written as 0."
    )
    parser = _add_command(jobs, "import-contacts", "SocioPatterns contacts -> PETs tables", description, _import)
    add = parser.add_argument
    add("--contacts", required=True, type=Path, metavar="FILE", help="tij_*.dat or .dat.gz")
    add(
        "--metadata", type=Path, metavar="FILE", help="metadata_*.dat: a row per person, with class, role or department"
    )
    add("--output", required=True, type=Path, metavar="DIR", help="folder to write")
    add(
        "--observed_days",
        required=True,
        type=int,
        metavar="N",
        help="days on which people wore sensors: a public constant of the study, not counted from the contacts",
    )
    add("--region_column", type=int, metavar="N", help="metadata column, from 1, for person.region; default: found")
    add("--activity", choices=ACTIVITY_NAMES, default="other", help="of all contacts; default other")
    add("--hours_ahead", type=float, default=0.0, metavar="H", help="hours to add to the file's times; default 0")
    _add_table_format(parser)


def _add_command(jobs: Any, name: str, help_text: str, description: str, run: Any) -> argparse.ArgumentParser:
    parser = jobs.add_parser(name, help=help_text, description=description, allow_abbrev=False)

    def run_without_beam(options: argparse.Namespace, unknown: tuple[str, ...] = ()) -> str:
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return run(options)

    parser.set_defaults(run=run_without_beam)
    return parser


def _add_table_format(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--format", choices=FORMATS, default="parquet", help="of the tables; default parquet")
    add("--rows_per_file", type=int, metavar="N", help="write folders of files with N rows; default one file per table")
    add("--overwrite", action="store_true", help="replace tables that exist")


def _generate(options: argparse.Namespace) -> str:
    # Imported late, as in all of these: the parser is also built for `--help` and for other jobs.
    from beam_pipelines.epidemic.population import PopulationOptions, generate_population

    given = _given(PopulationOptions, options)
    population = read_settings(
        PopulationOptions, {**given, "assignments": not options.no_assignments}, "the command line"
    )
    summary = generate_population(options.output, population, _table_format(options), options.overwrite)
    return f"{summary.text()}\npopulation: {options.output}"


def _simulate(options: argparse.Namespace) -> str:
    from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak

    outbreak = read_settings(OutbreakOptions, _given(OutbreakOptions, options), "the command line")
    output = options.output or options.input
    summary = simulate_outbreak(
        options.input, outbreak, output, _table_format(options), options.sparse, options.overwrite
    )
    return f"{summary.text()}\noutbreak: {output}"


def _import(options: argparse.Namespace) -> str:
    from beam_pipelines.epidemic.socio_patterns import ImportOptions, import_contacts

    activity = 1 + ACTIVITY_NAMES.index(options.activity)
    how = read_settings(ImportOptions, {**_given(ImportOptions, options), "activity": activity}, "the command line")
    summary = import_contacts(
        options.contacts, options.metadata, options.output, how, _table_format(options), options.overwrite
    )
    return f"{summary.text()}\npopulation: {options.output}"


def _given(kind: type[Settings], options: argparse.Namespace) -> dict[str, Any]:
    """What parsed options have of a class's fields, by name."""
    return {name: getattr(options, name) for name in kind.__struct_fields__ if hasattr(options, name)}


def _table_format(options: argparse.Namespace) -> Any:
    from beam_pipelines.epidemic.table_writer import TableFormat

    return TableFormat(options.format, options.rows_per_file)
