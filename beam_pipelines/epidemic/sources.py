"""Kinds of raw data whose examples are people of a contact graph; functions as in `beam_pipelines.sources.builders`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beam_pipelines.contact_graph.degree import parse_degree_bound
from beam_pipelines.contact_graph.rows import NUM_CLASSES, SOURCE, RowLayout
from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak
from beam_pipelines.epidemic.population import PopulationOptions, generate_population
from beam_pipelines.epidemic.socio_patterns import ImportOptions, import_contacts
from beam_pipelines.options import GENERATED, DataConfig, check_features
from tff_pdp.data.manifest import Manifest, RowInfluence
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import check_arguments

if TYPE_CHECKING:
    from beam_pipelines.options import ClientDatasetOptions, Summary


@dataclasses.dataclass(frozen=True)
class ContactGraph:
    """A population whose rows are still to be made.

    Attributes:
      tables: the folder of its tables.
      arguments: options of `ContactGraphOptions` beyond those of every job.
    """

    tables: Path
    arguments: Mapping[str, Any]

    def run(self, options: "ClientDatasetOptions") -> "Summary":
        """Makes the rows."""
        # Imported late: Beam takes seconds to start, and training from prepared data does not need it.
        from beam_pipelines.contact_graph.job import ContactGraphOptions, run_contact_graph_job

        return run_contact_graph_job(
            ContactGraphOptions(
                input=self.tables,
                output=options.output,
                seed=options.seed,
                max_bad_fraction=options.max_bad_fraction,
                overwrite=options.overwrite,
                validation_fraction=options.validation_fraction,
                min_people_per_silo=options.min_examples_per_client,
                num_shards=options.num_shards,
                **self.arguments,
            )
        )


def build_contact_graph(
    data: DataConfig,
    workspace: Path,
    *,
    degree_bound: Mapping[str, Any],
    silo_by: str = "person.region",
    num_slots: int = 20,
    layout: str = "slots",
    num_days: int = 57,
    window_days: int = 21,
    prediction_days: int = 7,
    num_windows: int = 1,
) -> ContactGraph:
    """People of a contact graph: own features, those of sampled contacts, and whether the person falls ill.

    `data.input` is the folder of a population's tables, in the schema of the US/UK PETs pandemic challenge. The test
    examples are everybody at the end of the observed days; `data.test_fraction` is not used. Train with
    `privacy.plan: contact_graph`, which takes from the data how many rows a person can change.

    Args:
      data: the experiment's data section; `input_shape` is the number of values in a row, and `num_classes` 2.
      workspace: not used.
      degree_bound: `{kind: promise, max_degree: D}`, `{kind: public_groups, group_column: ..., max_group_size: B}` or
        `{kind: edge}`; see `beam_pipelines.contact_graph.degree`.
      silo_by: `person.<column>`, `household.<column>` or `residence_grid.<degrees>`.
      num_slots: how many contacts a row looks at; 0 for rows of people alone.
      layout: `slots`, `summary` or `exposure`.
      num_days: how many days were observed.
      window_days: how many days of history a row has.
      prediction_days: how many days ahead.
      num_windows: rows of each person.

    Raises:
      ConfigError: an argument is out of range, or the shape or the number of classes does not fit.
    """
    del workspace
    arguments = {
        "degree_bound": degree_bound,
        "silo_by": silo_by,
        "num_slots": num_slots,
        "layout": layout,
        "num_days": num_days,
        "window_days": window_days,
        "prediction_days": prediction_days,
        "num_windows": num_windows,
    }
    check_features(data, (RowLayout(layout, num_slots, window_days).size,), NUM_CLASSES)
    return ContactGraph(Path(data.input), arguments)


def build_simulated_outbreak(
    data: DataConfig,
    workspace: Path,
    *,
    population: Mapping[str, Any],
    outbreak: Mapping[str, Any],
    rows: Mapping[str, Any],
    network: str | None = None,
    metadata: str | None = None,
) -> ContactGraph:
    """As `build_contact_graph`, of an outbreak that is simulated first; the tables are written into `workspace`.

    `data.input` is `generated`, for a made-up population; a file of contacts as SocioPatterns publishes them
    (`tij_*.dat`, `.gz`); or a folder with one such file and at most one `metadata_*.dat`, or one that has such folders.

    Args:
      data: the experiment's data section; `seed` decides population, outbreak, windows and sampling.
      workspace: a folder, made if missing.
      population: options of `PopulationOptions`; for published contacts, of `ImportOptions`, `observed_days` at least.
      outbreak: options of `OutbreakOptions`.
      rows: arguments of `build_contact_graph`.
      network: which of `data.input`'s folders; None for `data.input` itself.
      metadata: the file that says who the people of published contacts are; None for the one beside the contacts, if
        `data.input` is a folder.

    Raises:
      ConfigError: an argument is unknown, missing or out of range, or means nothing for this input.
      DataError: a file is missing or malformed.
    """
    source = build_contact_graph(
        data,
        workspace,
        **check_arguments(build_contact_graph, rows, "source 'simulated_outbreak'", "data.arguments.rows"),
    )
    workspace.mkdir(parents=True, exist_ok=True)
    if data.input == GENERATED:
        if network or metadata:
            raise ConfigError(
                f"data.arguments: network and metadata are for published contacts, and data.input is {GENERATED!r}"
            )
        options = _options(PopulationOptions, {"seed": data.seed, **population}, "population")
        generate_population(workspace, options, overwrite=True)
    else:
        contacts, people = _contact_files(Path(data.input), network)
        if metadata:
            people = Path(metadata)
        options = _options(ImportOptions, population, "population")
        import_contacts(contacts, people, workspace, options, overwrite=True)
    simulate_outbreak(workspace, _options(OutbreakOptions, {"seed": data.seed, **outbreak}, "outbreak"), overwrite=True)
    return dataclasses.replace(source, tables=workspace)


def _contact_files(given: Path, network: str | None) -> tuple[Path, Path | None]:
    """The files of contacts and, where there is one beside it, of metadata."""
    folder = given / network if network else given
    if network and not folder.is_dir():
        raise DataError(f"{folder}: no such folder; data.arguments.network names a folder of data.input")
    if not folder.is_dir():
        return given, None
    contacts, people = (
        sorted(path for suffix in ("dat", "dat.gz") for path in folder.glob(f"{name}_*.{suffix}"))
        for name in ("tij", "metadata")
    )
    if len(contacts) != 1 or len(people) > 1:
        raise DataError(
            f"{folder}: {len(contacts)} files tij_*.dat (or .gz) and {len(people)} files metadata_*.dat in it; a "
            "network has one of contacts and at most one of metadata"
        )
    return contacts[0], people[0] if people else None


def promised_influence(manifest: Manifest) -> RowInfluence | None:
    """How many rows of a data set one person, or one pair's contacts, can change; None where rows are independent.

    Raises:
      DataError: the manifest's promise is not the one that rows made with its parameters keep.
    """
    parameters = manifest.parameters
    if parameters.get("source") == SOURCE:
        bound = parse_degree_bound(parameters["degree_bound"])
        if manifest.row_influence != bound.influence(parameters["num_windows"], parameters["num_slots"]):
            raise DataError(
                "manifest.json: row_influence is not what rows of these parameters promise: it has been changed; "
                "prepare the data again"
            )
    return manifest.row_influence


def _options(kind: Any, given: Mapping[str, Any], key: str) -> Any:
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"data.arguments.{key}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(f"data.arguments.{key}: {error}") from None
