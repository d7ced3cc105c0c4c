"""Runs the contact-graph job: a population, its contacts and an outbreak in, a client dataset of people's rows out.

Clients are silos: regions, wards, school classes. The manifest has the number of rows a person can change, for privacy
plans.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pyarrow.parquet
from tqdm import tqdm

from beam_pipelines.contact_graph.contact_stages import CONTACT_COLUMNS, contact_stages
from beam_pipelines.contact_graph.degree import DegreeBound
from beam_pipelines.contact_graph.input_tables import chunks_of, find_table
from beam_pipelines.contact_graph.people_stages import people_stages
from beam_pipelines.contact_graph.rows import LAYOUTS, NUM_CLASSES, SOURCE, RowLayout, RowRules
from beam_pipelines.contact_graph.tables import read_observed_days
from beam_pipelines.dataset.job import DatasetJob, run_dataset_job
from beam_pipelines.options import JobOptions, Summary
from tff_pdp.data.manifest import FeatureSpec, FileRecord
from tff_pdp.errors import DataError

# For each shard: a task then holds some hundred megabytes.
_SHARD_CONTACTS = 2_000_000
# The size of a contact whose ids have seven digits.
_TEXT_BYTES, _GZIP_BYTES = 34, 9
# The least that options which are integers may be.
_INTEGERS = {
    "num_slots": 0,
    "num_days": 2,
    "window_days": 1,
    "prediction_days": 1,
    "num_windows": 1,
    "min_people_per_silo": 1,
    "num_shards": 0,
}
_SILO_BY = re.compile(r"(person|household)\.\w+|residence_grid\.\d+(\.\d+)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContactGraphOptions(JobOptions):
    """The rows to make of a contact graph.

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
      validation_fraction: expected share of people whose rows are for validation.
      min_people_per_silo: smaller silos are dropped.
      num_shards: number of shard files; 0 chooses it by the number of contacts. A task holds the contacts of
        one shard in memory.
    """

    degree_bound: DegreeBound
    silo_by: str = "person.region"
    num_slots: int = 20
    layout: Literal["slots", "summary", "exposure"] = "slots"
    num_days: int = 57
    window_days: int = 21
    prediction_days: int = 7
    num_windows: int = 1
    validation_fraction: float = 0.1
    min_people_per_silo: int = 10
    num_shards: int = 0

    def __post_init__(self):
        super().__post_init__()
        for key, least in _INTEGERS.items():
            value = getattr(self, key)
            # A bool is an int to isinstance.
            self._require(type(value) is int and value >= least, f"{key} must be an integer, at least {least}")
        self._require(
            isinstance(self.silo_by, str) and bool(_SILO_BY.fullmatch(self.silo_by)),
            "silo_by must be person.<column>, household.<column> or residence_grid.<degrees>",
        )
        kind, _, size = self.silo_by.partition(".")
        self._require(kind != "residence_grid" or float(size) > 0, "silo_by: cells must have more than 0 degrees")
        self._require(self.layout in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}")
        self._require(
            self.window_days + self.prediction_days <= self.num_days,
            "num_days must leave room for window_days and prediction_days",
        )
        self._require(self.num_days < 2**15 - 1, "num_days must be below 32767")
        self._require(0 <= self.validation_fraction < 1, "validation_fraction must lie in [0, 1)")
        self._require(self.num_shards <= 2**16, "num_shards must lie in [0, 65536]")


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
    layout = RowLayout(options.layout, options.num_slots, options.window_days, read_observed_days(folder))
    rules = RowRules(
        columns=columns,
        has_households=bool(tables["household"]),
        silo_by=options.silo_by,
        degree_bound=options.degree_bound,
        validation_fraction=options.validation_fraction,
        min_people=options.min_people_per_silo,
        num_days=options.num_days,
        prediction_days=options.prediction_days,
        num_windows=options.num_windows,
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
        row_influence=options.degree_bound.influence(options.num_windows, layout.num_slots),
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
    if options.silo_by.startswith("residence_grid"):
        required += ["residence_locations", "activity_location_assignment"]
    group = options.degree_bound.group_column or ""
    if "household." in (options.silo_by + group):
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
    if options.silo_by.startswith("residence_grid"):
        columns["residence_locations"] = ["rlid", "longitude", "latitude"]
    for name in (options.silo_by, options.degree_bound.group_column or ""):
        table, _, column = name.partition(".")
        if table in ("person", "household") and column not in columns[table]:
            columns[table].append(column)
    return {table: tuple(names) for table, names in columns.items()}
