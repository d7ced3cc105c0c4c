"""The commands `generate-population`, `simulate-outbreak` and `import-contacts` of `python -m beam_pipelines`."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, FORMATS


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

    population = PopulationOptions(
        num_people=options.num_people,
        contact_rows_per_person=options.contact_rows_per_person,
        num_regions=options.num_regions,
        seed=options.seed,
        max_contacts=options.max_contacts,
        community_size=options.community_size,
        assignments=not options.no_assignments,
    )
    summary = generate_population(options.output, population, _table_format(options), options.overwrite)
    return f"{summary.text()}\npopulation: {options.output}"


def _simulate(options: argparse.Namespace) -> str:
    from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak

    names = (field.name for field in dataclasses.fields(OutbreakOptions))
    outbreak = OutbreakOptions(**{name: getattr(options, name) for name in names})
    output = options.output or options.input
    summary = simulate_outbreak(
        options.input, outbreak, output, _table_format(options), options.sparse, options.overwrite
    )
    return f"{summary.text()}\noutbreak: {output}"


def _import(options: argparse.Namespace) -> str:
    from beam_pipelines.epidemic.socio_patterns import ImportOptions, import_contacts

    activity = 1 + ACTIVITY_NAMES.index(options.activity)
    how = ImportOptions(options.observed_days, options.region_column, activity, options.hours_ahead)
    summary = import_contacts(
        options.contacts, options.metadata, options.output, how, _table_format(options), options.overwrite
    )
    return f"{summary.text()}\npopulation: {options.output}"


def _table_format(options: argparse.Namespace) -> Any:
    from beam_pipelines.epidemic.table_writer import TableFormat

    return TableFormat(options.format, options.rows_per_file)
