"""Defines the commands of `python -m beam_pipelines`, which run jobs or write the tables of a population."""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec.structs import replace

from beam_pipelines.contact_graph.job import run_contact_graph_job
from beam_pipelines.contact_graph.rows import ContactGraphOptions
from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES
from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak
from beam_pipelines.epidemic.population import PopulationOptions, generate_population
from beam_pipelines.epidemic.socio_patterns import ImportOptions, import_contacts
from beam_pipelines.epidemic.table_writer import TableFormat
from beam_pipelines.options import ClientDatasetOptions, RawData, SourceSettings
from beam_pipelines.sources.celeba import CELEBA_CLASSES, Celeba
from beam_pipelines.sources.fed_emnist import FedEmnist
from beam_pipelines.sources.leaf import Leaf
from beam_pipelines.sources.nist import NistSd19, num_nist_classes
from tff_pdp.command_line import Command, Option, Outcome
from tff_pdp.settings import Count


class _Job(Command):
    """Runs on Beam, which gets the flags that the command does not know."""

    rest: ClassVar[str] = "pipeline_args"
    separator: ClassVar[str] = "_"

    def run(self) -> Outcome:
        """Runs the job, and shows its counts."""
        # Beam reports optional packages it does not find; a user can act on this package's warnings only.
        logging.basicConfig(level=logging.ERROR, format="%(message)s")
        logging.getLogger("beam_pipelines").setLevel(logging.WARNING)
        return Outcome(self.table())

    def table(self) -> str:
        """Runs the job, and returns its counts as text."""
        raise NotImplementedError


class _ImageJob(_Job):
    """Makes clients of images.

    Attributes:
      num_shards: number of output files; each must fit into a worker's memory.
    """

    source: SourceSettings
    job: ClientDatasetOptions
    num_shards: Count = 8

    def table(self) -> str:
        """Makes the client dataset, and returns the job's counts as text."""
        output = self.job.output.absolute()
        workspace = output.with_name(f".{output.name}.raw")
        try:
            raw = self.source.build(workspace)
            assert isinstance(raw, RawData)
            return run_client_dataset_job(raw, self.job).table()
        finally:
            shutil.rmtree(workspace, ignore_errors=True)


class Femnist(_ImageJob):
    """LEAF FEMNIST JSON -> client dataset.

    Reads every LEAF JSON file of a folder, splits each client's examples into train, validation and test, and writes
    TFRecord shards from which each client can be read alone. LEAF's folders train and test, if present, decide which
    examples are test examples.

      %(prog)s --input data/all_data --output data/clients

    Attributes:
      input: folder that contains LEAF files (`.json` or `.json.gz`), or LEAF's folders `train` and `test`.
    """

    source: Leaf
    fixed: ClassVar = {"kind": "leaf", "record_set": None}


class Nist(_ImageJob):
    """NIST SD19 PNG files -> client dataset.

    Joins NIST SD19's images sorted by writer with the same images sorted by class, as LEAF does. Each writer becomes a
    client.

      %(prog)s --input data/raw --output data/clients

    Attributes:
      input: folder that contains `by_class` and `by_write`.
    """

    source: NistSd19
    fixed: ClassVar = {"kind": "nist_sd19", "record_set": None, "num_classes": 62}

    def table(self) -> str:
        """Makes a client dataset of the chosen classes, and returns the job's counts as text."""
        num_classes = num_nist_classes(self.source.classes)
        job = dataclasses.replace(self.job, num_classes=num_classes)
        return super(Nist, replace(self, source=replace(self.source, num_classes=num_classes), job=job)).table()


class CelebA(_ImageJob):
    """CelebA -> client dataset.

    Makes a client of every person in CelebA, from the JPEGs and either CelebA's text files or LEAF's JSON.

      %(prog)s --input data/celeba --output data/clients

    Attributes:
      input: folder that contains `identity_CelebA.txt` and `list_attr_celeba.txt`, or LEAF files.
    """

    source: Celeba
    fixed: ClassVar = {"kind": "celeba", "record_set": None, "num_classes": CELEBA_CLASSES}


class FederatedEmnist(_ImageJob):
    """TFF's Federated EMNIST -> client dataset.

    Reads TensorFlow Federated's database of handwriting. The database's test examples stay test examples.

      %(prog)s --input emnist_all.sqlite.lzma --output data/clients

    Attributes:
      input: `emnist_all.sqlite`, `emnist_all.sqlite.lzma`, or a folder of the older `.h5` files.
      num_classes: number of classes: 10 for digits, 62 for all characters.
    """

    source: FedEmnist
    fixed: ClassVar = {"kind": "fed_emnist", "record_set": None}


class ContactGraph(_Job):
    """People, contacts and an outbreak (PETs tables) -> client dataset.

    Makes a row for each person: features and disease history of the person and of sampled contacts. The label is
    whether the person falls ill. Clients are silos, such as regions. The manifest states how many rows one person can
    change; the privacy plan `contact_graph` reads this number.

      %(prog)s --input data/virginia --degree_bound promise --max_degree 20 --output data/clients

    Attributes:
      input: folder that contains the tables person, population_network, disease_outcome_training, ...
      degree_bound: reason why one person can change only few rows. `promise`: nobody has met more than
        `max_degree` people; `public_groups`: contacts between groups by `group_column` are left out; `edge`: only
        contacts are protected.
      adjacency: for `promise` only. `replace_one` (default): a person becomes another person, which changes
        2 * `max_degree` + 1 rows; `replace_special`: a person is left out, which changes `max_degree` + 1 rows.
    """

    job: ContactGraphOptions

    def table(self) -> str:
        """Makes a client dataset of the rows, and returns the job's counts as text."""
        return run_contact_graph_job(self.job).table()


class _Tables(Command):
    """Writes tables, without Beam.

    Attributes:
      output: folder to write the tables into.
      overwrite: replace tables that exist.
    """

    output: Path
    tables: TableFormat
    overwrite: bool = False

    separator: ClassVar[str] = "_"


class GeneratePopulation(_Tables):
    """Generated people and contacts (PETs tables).

    Generates people with households, schools and workplaces, and their contacts, as tables of the PETs pandemic
    challenge. The population is for demos, tests and benchmarks; it is not an estimate for any country.
    """

    population: PopulationOptions

    def run(self) -> Outcome:
        """Generates a population."""
        summary = generate_population(self.output, self.population, self.tables, self.overwrite)
        return Outcome(f"{summary.text()}\npopulation: {self.output}")


class SimulateOutbreak(_Tables):
    """Simulated outbreak on a population's contacts.

    Simulates an outbreak on the tables person and population_network, day by day. Writes the tables
    disease_outcome_training (states on the observed days) and target (infections on the days after).

    Attributes:
      input: folder of the population's tables.
      output: folder to write the tables into; default: the population's folder.
      sparse: leave out rows with state S; a person without a row for a day is then in state S.
    """

    input: Path
    output: Path | None = None
    outbreak: OutbreakOptions
    sparse: bool = False

    at_most_one = (("reproduction_number", "transmission_rate"),)

    def run(self) -> Outcome:
        """Simulates an outbreak."""
        output = self.output or self.input
        summary = simulate_outbreak(self.input, self.outbreak, output, self.tables, self.sparse, self.overwrite)
        return Outcome(f"{summary.text()}\noutbreak: {output}")


class ImportContacts(_Tables):
    """SocioPatterns contacts -> PETs tables.

    Reads face-to-face contacts of a SocioPatterns study (tij_*.dat or .dat.gz: rows `t i j`) and writes the tables
    person, household and population_network. Ages are unknown and are written as 0.

    Attributes:
      contacts: file of contacts, `tij_*.dat` or `tij_*.dat.gz`.
      metadata: file of people, `metadata_*.dat`; the row of a person states class, role or department.
      activity: activity that is assumed for all contacts, because the file does not state activities.
    """

    contacts: Path
    metadata: Path | None = None
    how: ImportOptions
    activity: Annotated[str, Option(choices="beam_pipelines.contact_graph.tables:ACTIVITY_NAMES")] = "other"

    def run(self) -> Outcome:
        """Imports contacts."""
        how = replace(self.how, activity=1 + ACTIVITY_NAMES.index(self.activity))
        summary = import_contacts(self.contacts, self.metadata, self.output, how, self.tables, self.overwrite)
        return Outcome(f"{summary.text()}\npopulation: {self.output}")
