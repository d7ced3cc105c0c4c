"""Runs the contact-graph job: makes a client dataset of people's rows from a population, its contacts and an outbreak.

Clients are silos, such as regions, wards or school classes. The manifest states how many rows one person can change;
privacy plans read this number.
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet
from tqdm import tqdm

from beam_pipelines.contact_graph.contact_stages import CONTACT_COLUMNS, contact_stages
from beam_pipelines.contact_graph.input_tables import chunks_of, find_table
from beam_pipelines.contact_graph.people_stages import people_stages
from beam_pipelines.contact_graph.rows import NUM_CLASSES, SOURCE, ContactGraphOptions, RowRules
from beam_pipelines.contact_graph.tables import read_observed_days
from beam_pipelines.dataset.job import DatasetJob, run_dataset_job
from beam_pipelines.options import Summary
from tff_pdp.data.manifest import FeatureSpec, FileRecord
from tff_pdp.errors import DataError

# Number of contacts for each shard: a task then holds some hundred megabytes.
_SHARD_CONTACTS = 2_000_000
# Bytes of one contact in text and in gzip, for ids of seven digits.
_TEXT_BYTES, _GZIP_BYTES = 34, 9


def run_contact_graph_job(options: ContactGraphOptions) -> Summary:
    """Makes a client dataset of a contact graph's rows, unless the output already contains that dataset.

    `options.input` is the folder of the tables (`beam_pipelines.contact_graph.tables`).

    Raises:
      DataError: a table or column is missing, a file is damaged, more than `max_bad_fraction` of a table's rows are
        unusable, the degree bound does not hold, or the output exists and may not be replaced.
    """
    folder = Path(options.input)
    columns = _columns(options)
    tables = _find_tables(folder, options, columns)
    files = [path for paths in tables.values() for path in paths]
    about = [folder / "about.json"] if (folder / "about.json").exists() else []
    names = sorted(str(path.relative_to(folder)) for path in (*files, *about))
    sources = tuple(FileRecord.of(folder, name) for name in tqdm(names, desc="hash sources", unit="file"))
    contacts = tables.pop("population_network")
    layout = options.rows.layout_of(read_observed_days(folder))
    rules = RowRules(
        options=options,
        columns=columns,
        has_households=bool(tables["household"]),
        layout=layout,
        features=FeatureSpec.of((layout.size,), NUM_CLASSES, x_dtype="uint8"),
        num_shards=options.num_shards or _enough_shards(contacts),
    )
    people_chunks = [chunk for table, paths in tables.items() for chunk in chunks_of(table, paths)]
    contact_chunks = chunks_of("population_network", contacts)
    job = DatasetJob(
        parameters={**options.parameters(), "source": SOURCE, "features": list(layout.names)},
        sources=sources,
        features=rules.features,
        num_shards=rules.num_shards,
        stages=(*people_stages(people_chunks, rules), *contact_stages(contact_chunks, rules)),
        row_influence=options.rows.degree_bound.influence(options.rows.num_windows, layout.num_slots),
    )
    return run_dataset_job(job, options)


def _enough_shards(contacts: tuple[Path, ...]) -> int:
    rows = sum(
        pyarrow.parquet.read_metadata(path).num_rows
        if path.suffix == ".parquet"
        else path.stat().st_size // (_GZIP_BYTES if path.suffix == ".gz" else _TEXT_BYTES)
        for path in contacts
    )
    return 1 + rows // _SHARD_CONTACTS


def _find_tables(
    folder: Path, options: ContactGraphOptions, columns: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[Path, ...]]:
    """Finds the files of every table, and checks their columns before any stage runs."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; --input must be the folder of a population's tables")
    tables = {table: find_table(folder, table, columns[table]) for table in columns}
    required = ["person", "population_network", "disease_outcome_training"]
    if options.rows.silo_by.startswith("residence_grid"):
        required += ["residence_locations", "activity_location_assignment"]
    group = options.rows.degree_bound.group_column or ""
    if "household." in (options.rows.silo_by + group):
        required.append("household")
    missing = [table for table in required if not tables.get(table)]
    if missing:
        raise DataError(
            f"{folder}: no table {', '.join(missing)} in it, as .parquet, .csv, .csv.gz or a folder of files"
        )
    return tables


def _columns(options: ContactGraphOptions) -> dict[str, tuple[str, ...]]:
    """Returns the columns to read, by table."""
    columns: dict[str, list[str]] = {
        "person": ["pid", "hid", "age", "sex"],
        "household": ["hid", "hh_size"],
        "activity_location_assignment": ["pid", "lid", "activity_type", "duration"],
        "disease_outcome_training": ["pid", "day", "state"],
        "target": ["pid", "infected"],
        "population_network": list(CONTACT_COLUMNS),
    }
    if options.rows.silo_by.startswith("residence_grid"):
        columns["residence_locations"] = ["rlid", "longitude", "latitude"]
    for name in (options.rows.silo_by, options.rows.degree_bound.group_column or ""):
        table, _, column = name.partition(".")
        if table in ("person", "household") and column not in columns[table]:
            columns[table].append(column)
    return {table: tuple(names) for table, names in columns.items()}
