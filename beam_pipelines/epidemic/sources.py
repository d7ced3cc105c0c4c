"""Makes rows of people from existing tables (source `contact_graph`) or a simulation (source `simulated_outbreak`)."""

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
    """Folder of a population's tables, from which a job makes rows."""

    tables: Path
    rows: RowSettings

    def run(self, options: "ClientDatasetOptions") -> "Summary":
        """Makes a client dataset of people's rows."""
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
    """Makes a row for each person: features of the person and of sampled contacts, and whether the person falls ill.

    `input` is the folder of a population's tables, in the schema of the US/UK PETs pandemic challenge; `input_shape` is
    the number of values in a row, and `num_classes` is 2: the label is 1 if the person falls ill. The test examples are
    one row for each person whom table `target` lists, at the end of the observed days; `test_fraction` is not used.
    Train with `privacy.kind: contact_graph`, which reads from the data how many rows one person can change.

    Attributes:
      rows: how people become rows.
    """

    rows: RowSettings

    def build(self, workspace: Path) -> People:
        """Describes the population's tables to the job.

        Raises:
          ConfigError: `input_shape` or `num_classes` differs from the rows.
        """
        self.check_features((self.rows.layout_of().size,), NUM_CLASSES)
        return People(Path(self.input), self.rows)


class SimulatedOutbreak(SourceSettings):
    """Simulates an outbreak on contacts, and makes rows as kind `contact_graph` does.

    `input` is one of these: `generated`, for a generated population; a file of contacts that SocioPatterns published
    (`tij_*.dat` or `.dat.gz`); a folder with one such file and at most one `metadata_*.dat`; or a folder of such
    folders, of which `network` names one.

    Attributes:
      rows: how people become rows.
      outbreak: settings of the outbreak; the default seed is the seed of the data.
      population: settings of a generated population (the default seed is the seed of the data), or of the import of
        contacts.
      network: subfolder of `input` that contains the contacts; default: `input` itself.
      metadata: file of people's metadata, such as class and sex; default: the metadata file beside the contacts, if
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
            raise ValueError(f"network and metadata are for published contacts, but input is {GENERATED!r}")
        # Read here, because the type of `population` depends on the input: wrong keys are found before a job runs.
        try:
            self._population_options()
            self._outbreak_options()
        except ConfigError as error:
            # The reader of section `data` adds the section and the file.
            raise ValueError(str(error).removeprefix("data: ")) from None

    def build(self, workspace: Path) -> People:
        """Generates or imports a population, simulates an outbreak, and writes the tables into `workspace`.

        Raises:
          ConfigError: `input_shape` or `num_classes` differs from the rows.
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
    """Finds the file of contacts and, if there is one, the file of metadata beside it."""
    folder = given / network if network else given
    if network and not folder.is_dir():
        raise DataError(f"{folder}: no such folder; data.network must be a subfolder of data.input")
    if not folder.is_dir():
        return given, None
    contacts, people = (
        sorted(path for suffix in ("dat", "dat.gz") for path in folder.glob(f"{name}_*.{suffix}"))
        for name in ("tij", "metadata")
    )
    if len(contacts) != 1 or len(people) > 1:
        raise DataError(
            f"{folder}: {len(contacts)} files tij_*.dat (or .gz) and {len(people)} files metadata_*.dat in it; a "
            "network has one tij_*.dat and at most one metadata_*.dat"
        )
    return contacts[0], people[0] if people else None


def promised_influence(manifest: Manifest) -> RowInfluence | None:
    """Returns the bound on how many rows one person, or one pair's contacts, can change; None if rows are independent.

    Raises:
      DataError: the manifest's bound differs from the bound that follows from the manifest's parameters.
    """
    parameters = manifest.parameters
    if parameters.get("source") == SOURCE:
        bound = read_settings(DegreeBound, parameters["degree_bound"], "manifest.json", "parameters.degree_bound")
        if manifest.row_influence != bound.influence(parameters["num_windows"], parameters["num_slots"]):
            raise DataError(
                "manifest.json: row_influence is not the bound that the manifest's parameters give: the file was "
                "changed; prepare the data again"
            )
    return manifest.row_influence
