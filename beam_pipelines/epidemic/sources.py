"""Makes rows of people: the sources `contact_graph`, of tables there are, and `simulated_outbreak`, of made-up ones."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from beam_pipelines.contact_graph.degree import DegreeBound
from beam_pipelines.contact_graph.job import run_contact_graph_job
from beam_pipelines.contact_graph.rows import NUM_CLASSES, SOURCE, ContactGraphOptions, RowSettings
from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak
from beam_pipelines.epidemic.population import PopulationOptions, generate_population
from beam_pipelines.epidemic.socio_patterns import ImportOptions, import_contacts
from beam_pipelines.options import GENERATED, SourceSettings
from tff_pdp.data.manifest import Manifest, RowInfluence
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import read_settings

if TYPE_CHECKING:
    from beam_pipelines.options import ClientDatasetOptions, Summary


@dataclasses.dataclass(frozen=True)
class People:
    """A population, given by the folder of its tables, whose rows are still to be made."""

    tables: Path
    rows: RowSettings

    def run(self, options: "ClientDatasetOptions") -> "Summary":
        """Makes the rows."""
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
                rows=self.rows,
            )
        )


class ContactGraph(SourceSettings):
    """Makes rows of a contact graph: own features, those of sampled contacts, and whether the person falls ill.

    `input` is the folder of a population's tables, in the schema of the US/UK PETs pandemic challenge; `input_shape` is
    the number of values in a row, and `num_classes` 2. The test examples are everybody at the end of the observed days;
    `test_fraction` is not used. Train with `privacy.kind: contact_graph`, which takes from the data how many rows a
    person can change.

    Attributes:
      rows: how people become rows.
    """

    rows: RowSettings

    def build(self, workspace: Path) -> People:
        """Describes the tables.

        Raises:
          ConfigError: the shape or the number of classes does not fit.
        """
        self.check_features((self.rows.layout_of().size,), NUM_CLASSES)
        return People(Path(self.input), self.rows)


class SimulatedOutbreak(SourceSettings):
    """Simulates an outbreak, and makes rows of it as `contact_graph`.

    `input` is `generated`, for a made-up population; a file of contacts as SocioPatterns publishes them (`tij_*.dat`,
    `.gz`); or a folder with one such file and at most one `metadata_*.dat`, or one that has such folders.

    Attributes:
      rows: how people become rows.
      outbreak: settings of the outbreak; the default seed is that of the data.
      population: settings of a made-up population, with the same default seed, or of the import of published contacts.
      network: which of `input`'s folders; None for `input` itself.
      metadata: the file that says who the people of published contacts are; None for the one beside the contacts, if
        `input` is a folder.
    """

    rows: RowSettings
    outbreak: dict[str, bool | int | float | str | None]
    population: dict[str, bool | int | float | str | None]
    network: str | None = None
    metadata: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.input == GENERATED and (self.network or self.metadata):
            raise ValueError(f"network and metadata are for published contacts, and input is {GENERATED!r}")
        # Read here, as the type of `population` depends on the input: wrong keys come to light before a job runs.
        try:
            self._population_options()
            self._outbreak_options()
        except ConfigError as error:
            # The reader of the section adds its name and the file.
            raise ValueError(str(error).removeprefix("data: ")) from None

    def build(self, workspace: Path) -> People:
        """Writes the tables into the workspace.

        Raises:
          ConfigError: the shape or the number of classes does not fit.
          DataError: a file is missing or malformed.
        """
        self.check_features((self.rows.layout_of().size,), NUM_CLASSES)
        workspace.mkdir(parents=True, exist_ok=True)
        options = self._population_options()
        if isinstance(options, PopulationOptions):
            generate_population(workspace, options, overwrite=True)
        else:
            contacts, people = _contact_files(Path(self.input), self.network)
            people = Path(self.metadata) if self.metadata else people
            import_contacts(contacts, people, workspace, options, overwrite=True)
        simulate_outbreak(workspace, self._outbreak_options(), overwrite=True)
        return People(workspace, self.rows)

    def _population_options(self) -> PopulationOptions | ImportOptions:
        if self.input == GENERATED:
            return read_settings(PopulationOptions, {"seed": self.seed, **self.population}, "data", "population")
        return read_settings(ImportOptions, self.population, "data", "population")

    def _outbreak_options(self) -> OutbreakOptions:
        return read_settings(OutbreakOptions, {"seed": self.seed, **self.outbreak}, "data", "outbreak")


def _contact_files(given: Path, network: str | None) -> tuple[Path, Path | None]:
    """Finds the files of contacts and, where there is one beside it, of metadata."""
    folder = given / network if network else given
    if network and not folder.is_dir():
        raise DataError(f"{folder}: no such folder; data.network names a folder of data.input")
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
    """Returns how many rows one person, or one pair's contacts, can change; None where rows are independent.

    Raises:
      DataError: the manifest's promise is not the one that rows made with its parameters keep.
    """
    parameters = manifest.parameters
    if parameters.get("source") == SOURCE:
        bound = read_settings(DegreeBound, parameters["degree_bound"], "manifest.json", "parameters.degree_bound")
        if manifest.row_influence != bound.influence(parameters["num_windows"], parameters["num_slots"]):
            raise DataError(
                "manifest.json: row_influence is not what rows of these parameters promise: it has been changed; "
                "prepare the data again"
            )
    return manifest.row_influence
