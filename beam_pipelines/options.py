"""Describes jobs without starting Beam: section `data` of an experiment, raw data, options, rules and summary."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_type_hints

from msgspec import Meta

from beam_pipelines.records import UserRecord
from beam_pipelines.rules import ExampleRule, SplitRule
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, SPLITS, FeatureSpec, Manifest
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import Count, CountOrZero, Fraction, Name, Settings, read_settings, to_plain

if TYPE_CHECKING:
    # It starts Beam, which describing a job does not need.
    from beam_pipelines.engine.stages import Stage


class PreparedSource(Protocol):
    """Input with a job of its own, for a kind of raw data that does not consist of users with examples."""

    def run(self, options: "ClientDatasetOptions") -> "Summary":
        """Prepares a client dataset, or finds one that is already there; raises DataError as other jobs do."""
        ...


@dataclasses.dataclass(frozen=True)
class RawData:
    """The input of a client-dataset job.

    Attributes:
      source: name of the kind of data, as in `tff_pdp.experiment.kinds.SOURCES`.
      folder: the folder of the files; every worker must see it under this name.
      files: names of the files, for their hashes in the manifest. Data in very many files have none here, and one hash
        of all in `parameters`.
      read_users: path of a file, or of one of `parts` -> every copy of every user in it, not judged. Picklable. Raises
        DataError, naming the file, for a file that cannot be used at all.
      are_images: whether the values of an example are pixels, in [0, 1]; otherwise any finite numbers.
      has_test_examples: whether the source itself says which examples are for test.
      has_validation_examples: whether the source also says which of the others are for validation.
      parts: paths in `folder` for `read_users`, one for a task, such as those of `part_names`; default: the files.
      user_stages: builds the stages whose last one gives the table of users, by
        `beam_pipelines.dataset.clients.user_pieces`, where a user's examples are not found in one place, in place of
        `read_users`.
      parameters: everything else that decided the content, as JSON has it, for the manifest.
    """

    source: str
    folder: Path
    files: tuple[str, ...]
    read_users: Callable[[Path], Iterable[UserRecord]] | None
    are_images: bool
    has_test_examples: bool = False
    has_validation_examples: bool = False
    parts: tuple[str, ...] = ()
    user_stages: "Callable[[ClientRules], Sequence[Stage]] | None" = None
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        """Returns what single tasks read: the parts, or else the files."""
        return self.parts or self.files


def files_in(folder: Path) -> list[Path]:
    """Lists the files in a folder, sorted by name, but for hidden ones: macOS leaves `._a.json` beside `a.json`.

    Raises:
      DataError: a link leads nowhere.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    check_links(paths)
    return [path for path in paths if path.is_file()]


def check_links(paths: Iterable[Path]) -> None:
    """Refuses links that lead nowhere, as where large files of a repository have not been fetched; raises DataError."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"{path}: a link to {path.readlink()}, which is not there; fetch the file or remove the link"
            )


def part_names(file: str, count: int) -> tuple[str, ...]:
    """Names the parts of a file that is read by several tasks: `images.txt:0/3`, `images.txt:1/3`, ..."""
    return tuple(f"{file}:{number}/{count}" for number in range(count))


def split_part(path: Path) -> tuple[Path, int, int]:
    """Splits a path into the file, the number of the part and the number of parts; a whole file is part 0 of 1."""
    named = re.fullmatch(r"(.*):(\d+)/(\d+)", str(path))
    return (Path(named[1]), int(named[2]), int(named[3])) if named else (path, 0, 1)


# The value of `data.input` for made-up data.
GENERATED = "generated"


class SourceSettings(Settings):
    """Says where examples come from, and how they become a client dataset; a kind of raw data adds fields of its own.

    Attributes:
      kind: of the raw data: a name from `tff_pdp.experiment.kinds.SOURCES`, or `module:name`.
      input: the raw data: a file or folder, as the kind says.
      input_shape: shape of one example: `[height, width, channels]` of an image, `[d]` of a feature vector.
      num_classes: labels are integers in `[0, num_classes)`; 0 for a regression, whose labels are finite numbers.
      validation_fraction: share of each client's examples for choosing settings; where the source has test examples of
        its own, share of the others.
      test_fraction: share of each client's examples for the final figures only; not used where the source has its own.
      exact_split: make each client's shares exact, rounded up to whole examples, instead of expected.
      min_examples_per_client: smaller clients are left out, and counted.
      num_shards: number of output files.
      seed: decides the splits, and whatever else a kind draws.
      max_bad_fraction: preparing fails when more than this share of the examples cannot be used.
      record_set: whose records these are, where that cannot be seen from their content: one name for all clients, or a
        name by client. Runs on records of one name are counted together, in whatever form the records are; users and
        silos of one id under different names are not the same.
    """

    kind: Name
    input: Name
    input_shape: Annotated[tuple[Count, ...], Meta(min_length=1)] = (28, 28, 1)
    num_classes: CountOrZero = 62
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    test_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    exact_split: bool = False
    min_examples_per_client: Count = 10
    num_shards: Count = 2
    seed: CountOrZero = 0
    max_bad_fraction: Fraction = 0.01
    record_set: Name | dict[str, Name] | None = None

    def __post_init__(self):
        if not self.validation_fraction + self.test_fraction < 1:
            raise ValueError("validation_fraction and test_fraction must leave room for training examples")

    def build(self, workspace: Path) -> RawData | PreparedSource:
        """Describes the raw data to a job; may first write files into the workspace, a folder that is made if missing.

        Raises:
          ConfigError: a setting does not suit the input.
          DataError: the input is missing or damaged.
        """
        raise NotImplementedError

    def check_features(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Compares `input_shape` and `num_classes` with those of the source.

        Raises:
          ConfigError: they differ; the message has both.
        """
        if (self.input_shape, self.num_classes) != (shape, num_classes):
            raise ConfigError(
                f"data.input_shape and data.num_classes are {list(self.input_shape)} and {self.num_classes}; "
                f"{self.kind} has {list(shape)} and {num_classes}"
            )

    def job_options(self, output: Path, *, overwrite: bool) -> "ClientDatasetOptions":
        """Returns the options of the job that makes a client dataset in a folder of its own."""
        names = {field.name for field in dataclasses.fields(ClientDatasetOptions)} & set(self.__struct_fields__)
        shared = {name: getattr(self, name) for name in names}
        return ClientDatasetOptions(**shared, output=output, overwrite=overwrite)


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Options of every job.

    Attributes:
      input: where the raw data lie, as the user named it; for messages.
      output: folder to write; every worker must see it under this name.
      seed: keys whatever the job decides by hash.
      max_bad_fraction: the job fails if more than this share of the input cannot be used.
      dead_letters: where a failing job keeps its dead letters; default: `<output>.dead_letters`.
      overwrite: replace a finished dataset that was prepared differently.
      exchange: how pieces get from one stage to the next: `files`, stage after stage, in bounded memory, and a job that
        was killed goes on where it was; or `runner`, all stages as one pipeline, for a cluster.
      runner: the Beam runner. Not DirectRunner, which may download Prism, another runner, and use that.
      pipeline_args: flags for Beam, such as `--direct_num_workers=2`, `--direct_running_mode=multi_processing`.

    Raises:
      ConfigError: a value is out of range.
    """

    input: Path
    output: Path
    seed: CountOrZero = 0
    max_bad_fraction: Fraction = 0.01
    dead_letters: Path | None = None
    overwrite: bool = False
    exchange: Literal["files", "runner"] = "files"
    runner: str = "FnApiRunner"
    pipeline_args: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("input", "output", "dead_letters"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else Path(value))
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            read_settings(hint, getattr(self, name), "options of the job", name)

    def parameters(self) -> dict[str, Any]:
        """Returns the options that decide the content of the dataset, not where and how it is made, as JSON values."""
        elsewhere = {"input", "output", "dead_letters", "overwrite", "exchange", "runner", "pipeline_args"}
        parameters = {key: value for key, value in dataclasses.asdict(self).items() if key not in elsewhere}
        return json.loads(json.dumps(parameters, default=to_plain))


@dataclasses.dataclass(frozen=True)
class Summary:
    """The outcome of a job; `skipped` means that the output already held exactly this dataset."""

    output: Path
    manifest: Manifest
    skipped: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts and the folder, flat, for printing or JSON."""
        manifest = self.manifest
        held_out = sum(not counts["train"] for counts in manifest.clients.values())
        return {
            "clients": manifest.kept.users,
            **({"clients_without_train_examples": held_out} if held_out else {}),
            **{f"{split}_examples": manifest.num_examples[split] for split in SPLITS},
            "examples_read": manifest.read.examples,
            **{f"dropped ({reason})": tally.examples for reason, tally in sorted(manifest.dropped.items())},
            **{
                f"{table} {what}": number
                for table, counts in sorted(manifest.rows.items())
                for what, number in (
                    ("read", counts.read),
                    ("kept", counts.kept),
                    *((f"dropped ({reason})", dropped) for reason, dropped in sorted(counts.dropped.items())),
                )
            },
            "dead_letters": str(self.output / DEAD_LETTER_FOLDER),
            "output": str(self.output),
            "skipped": self.skipped,
        }

    def table(self) -> str:
        """Returns the same as aligned lines of text."""
        return "\n".join(f"{key:<48} {value}" for key, value in self.as_dict().items())


@dataclasses.dataclass(frozen=True)
class ClientRules:
    """Rules by which users become clients.

    Attributes:
      features: of the examples written.
      examples: which examples are valid.
      splits: which of them are for training, validation and test.
      min_examples: clients with fewer valid examples are dropped.
      num_shards: of the dataset.
    """

    features: FeatureSpec
    examples: ExampleRule
    splits: SplitRule
    min_examples: int
    num_shards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientDatasetOptions(JobOptions):
    """Options of a client-dataset job. Fields that are not listed mean what `SourceSettings` says.

    Attributes:
      num_shards: number of shard files. One worker holds the users of one shard in memory.
      split_by: `sample`, every client's examples are divided; or `user`, all of a client's examples are in one split,
        so that tests are about people that training has not seen.

    Raises:
      ConfigError: a value is out of range.
    """

    input_shape: Annotated[tuple[Count, ...], Meta(min_length=1)]
    num_classes: CountOrZero
    test_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    exact_split: bool = False
    split_by: Literal["sample", "user"] = "sample"
    min_examples_per_client: Count = 10
    num_shards: Count = 8

    def __post_init__(self):
        super().__post_init__()
        if not self.test_fraction + self.validation_fraction < 1:
            raise ConfigError("test_fraction and validation_fraction must leave room for train")
        if self.exact_split and self.split_by == "user":
            raise ConfigError("exact_split is for split_by sample: users go by hash")
