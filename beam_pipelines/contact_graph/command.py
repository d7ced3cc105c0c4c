"""The command `python -m beam_pipelines contact-graph`."""

import argparse
from typing import Any

from beam_pipelines.commands import add_command, add_job_arguments, build_options
from beam_pipelines.contact_graph.rows import LAYOUTS

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
    from beam_pipelines.contact_graph.job import ContactGraphOptions, run_contact_graph_job

    keys = ("max_degree", "adjacency", "group_column", "max_group_size")
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    bound = {"kind": options.degree_bound, **given}
    return run_contact_graph_job(build_options(ContactGraphOptions, options, pipeline_args, degree_bound=bound)).table()
