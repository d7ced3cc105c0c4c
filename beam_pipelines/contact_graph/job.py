"""Runs the contact-graph job: a population, its contacts and an outbreak in, a client dataset of people's rows out.

Clients are silos: regions, wards, school classes. The manifest has the number of rows a person can change, for privacy
plans.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow.parquet
from msgspec import Meta
from tqdm import tqdm

from beam_pipelines.contact_graph.contact_stages import CONTACT_COLUMNS, contact_stages
from beam_pipelines.contact_graph.degree import DegreeBound
from beam_pipelines.contact_graph.input_tables import chunks_of, find_table
from beam_pipelines.contact_graph.people_stages import people_stages
from beam_pipelines.contact_graph.rows import NUM_CLASSES, SOURCE, RowLayout, RowRules
from beam_pipelines.contact_graph.tables import read_observed_days
from beam_pipelines.dataset.job import DatasetJob, run_dataset_job
from beam_pipelines.options import JobOptions, Summary
from tff_pdp.data.manifest import FeatureSpec, FileRecord
from tff_pdp.errors import DataError
from tff_pdp.settings import Count, CountOrZero, Settings

# For each shard: a task then holds some hundred megabytes.
_SHARD_CONTACTS = 2_000_000
# The size of a contact whose ids have seven digits.
_TEXT_BYTES, _GZIP_BYTES = 34, 9


class RowSettings(Settings):
    """Says how people become rows.

    Attributes:
      degree_bound: how many rows a person can change; see `beam_pipelines.contact_graph.degree`.
      silo_by: who belongs to which silo: `person.<column>`, `household.<column>`, or `residence_grid.<degrees>`, the
        cell of a grid that a person's home lies in. Contacts between silos are left out.
      num_slots: S, how many contacts a row looks at; 0 for rows of people alone.
      layout: `slots`, a block of numbers for each contact; `summary`, their mean; or `exposure`, ten numbers; see
        `beam_pipelines.contact_graph.rows`.
      num_days: how many days were observed, from day 0.
      window_days: how many days of history a row has.
      prediction_days: the label of a row is whether the person falls ill in so many days after its history. In tests,
        whose history ends with the last day, table `target` says so.
      num_windows: rows for each person in training or validation, each of another time. More rows are more influence.
    """

    degree_bound: DegreeBound
    silo_by: Annotated[str, Meta(pattern=r"^((person|household)\.\w+|residence_grid\.\d+(\.\d+)?)$")] = "person.region"
    num_slots: CountOrZero = 20
    layout: Literal["slots", "summary", "exposure"] = "slots"
    num_days: Annotated[int, Meta(ge=2, lt=2**15 - 1)] = 57
    window_days: Count = 21
    prediction_days: Count = 7
    num_windows: Count = 1

    def __post_init__(self):
        kind, _, size = self.silo_by.partition(".")
        if kind == "residence_grid" and not float(size) > 0:
            raise ValueError("silo_by: cells must have more than 0 degrees")
        if self.window_days + self.prediction_days > self.num_days:
            raise ValueError("num_days must leave room for window_days and prediction_days")

    @property
    def num_values(self) -> int:
        """Returns how many numbers a row has."""
        return RowLayout(self.layout, self.num_slots, self.window_days).size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContactGraphOptions(JobOptions):
    """The rows to make of a contact graph.

    Attributes:
      rows: how people become rows.
      validation_fraction: expected share of people whose rows are for validation.
      min_people_per_silo: smaller silos are dropped.
      num_shards: number of shard files; 0 chooses it by the number of contacts. A task holds the contacts of
        one shard in memory.
    """

    rows: RowSettings
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    min_people_per_silo: Count = 10
    num_shards: Annotated[int, Meta(ge=0, le=2**16)] = 0

    def parameters(self) -> dict[str, Any]:
        """Returns those of any job, and those of rows among them."""
        own = super().parameters()
        return {
            name: value for key in own for name, value in (own[key].items() if key == "rows" else [(key, own[key])])
        }


def run_contact_graph_job(options: ContactGraphOptions) -> Summary:
    """Makes rows of a contact graph, or finds that they are already there.

    Options' `input` is the folder of the tables (`beam_pipelines.contact_graph.tables`).

    Raises:
      DataError: a table or column is missing, a file is damaged, more than `max_bad_fraction` of a table's rows are
        unusable, the degree bound does not hold, or the output is in the way.
    """
    folder = Path(options.input)
    columns = _columns(options)
    tables = _find_tables(folder, options, columns)
    files = [path for paths in tables.values() for path in paths]
    about = [folder / "about.json"] if (folder / "about.json").exists() else []
    names = sorted(str(path.relative_to(folder)) for path in (*files, *about))
    sources = tuple(FileRecord.of(folder, name) for name in tqdm(names, desc="hash sources", unit="file"))
    contacts = tables.pop("population_network")
    layout = RowLayout(
        options.rows.layout, options.rows.num_slots, options.rows.window_days, read_observed_days(folder)
    )
    rules = RowRules(
        columns=columns,
        has_households=bool(tables["household"]),
        silo_by=options.rows.silo_by,
        degree_bound=options.rows.degree_bound,
        validation_fraction=options.validation_fraction,
        min_people=options.min_people_per_silo,
        num_days=options.rows.num_days,
        prediction_days=options.rows.prediction_days,
        num_windows=options.rows.num_windows,
        layout=layout,
        features=FeatureSpec.of((layout.size,), NUM_CLASSES, x_dtype="uint8"),
        seed=options.seed,
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
    """Finds the files of every table, and checks their columns before anything is run."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; --input takes the folder of a population's tables")
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
