"""Describes jobs without importing Beam: the section `data`, raw data, and a job's options, rules and summary."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_type_hints

from msgspec import Meta
from msgspec.structs import replace

from beam_pipelines.records import UserRecord
from beam_pipelines.rules import ExampleRule, SplitRule
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, SPLITS, FeatureSpec, Manifest
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import Count, CountOrZero, Fraction, Name, Settings, read_settings, to_plain

if TYPE_CHECKING:
    # It imports Beam, which the description of a job does not need.
    from beam_pipelines.engine.stages import Stage


class PreparedSource(Protocol):
    """Raw data that do not consist of users with examples, and therefore need a job of their own."""

    def run(self, options: "ClientDatasetOptions") -> "Summary":
        """Makes a client dataset, unless the output already contains it; raises DataError as `run_dataset_job` does."""
        ...


@dataclasses.dataclass(frozen=True)
class RawData:
    """Input of a client-dataset job.

    Attributes:
      source: name of the kind of data, as in `tff_pdp.experiment.kinds.SOURCES`.
      folder: folder of the files; every worker must see the folder under this name.
      files: names of the files whose hashes go into the manifest; empty for data in very many files, for which
        `parameters` has one hash of all files.
      read_users: picklable function that takes the path of a file or of a part of a file, and yields the unchecked
        copies of all users in this file or part. The function raises DataError, with the file's name, for a file that
        cannot be used at all. None if `user_stages` is given.
      are_images: whether the values of an example are pixels in [0, 1]; otherwise any finite numbers are valid.
      has_test_examples: whether the source states which examples are for test.
      has_validation_examples: whether the source also states which of the other examples are for validation.
      parts: paths in `folder`, one for each task that calls `read_users` (see `part_names`); default: the files.
      user_stages: function that takes the job's rules and builds the stages that read users. The function replaces
        `read_users` if a user's examples are in several files. The last stage makes the table of users with
        `beam_pipelines.dataset.clients.user_pieces`.
      parameters: everything else that decides the dataset's content; JSON values, recorded in the manifest.
      features: shape and types of the examples, where the data decide them; None if the job's options do.
      class_names: name of each class, in the order of the labels; None if classes have numbers only.
      treated_as_public: constants taken from the examples of all clients without noise, as in the manifest.
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
    features: FeatureSpec | None = None
    class_names: tuple[str, ...] | None = None
    treated_as_public: tuple[str, ...] = ()

    @property
    def units(self) -> tuple[str, ...]:
        """Returns one path for each task: the parts if there are any, otherwise the files."""
        return self.parts or self.files


def files_in(folder: Path) -> list[Path]:
    """Lists a folder's files, sorted by name, without hidden files such as macOS's `._a.json` beside `a.json`.

    Raises:
      DataError: the target of a link is missing.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    check_links(paths)
    return [path for path in paths if path.is_file()]


def check_links(paths: Iterable[Path]) -> None:
    """Raises DataError for a link whose target is missing, for example because a large file has not been fetched."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"{path}: a link to {path.readlink()}, which does not exist; fetch the file or remove the link"
            )


def part_names(file: str, count: int) -> tuple[str, ...]:
    """Returns the names of the parts of a file that several tasks read: `images.txt:0/3`, `images.txt:1/3`, ..."""
    return tuple(f"{file}:{number}/{count}" for number in range(count))


def split_part(path: Path) -> tuple[Path, int, int]:
    """Splits a part's path into the file, the part's number and the number of parts; a whole file is part 0 of 1."""
    named = re.fullmatch(r"(.*):(\d+)/(\d+)", str(path))
    return (Path(named[1]), int(named[2]), int(named[3])) if named else (path, 0, 1)


# The value of `data.input` for generated data.
GENERATED = "generated"


class SourceSettings(Settings):
    """Settings of raw data, and of the job that makes a client dataset; each kind of raw data adds fields.

    Attributes:
      kind: kind of the raw data: a name from `tff_pdp.experiment.kinds.SOURCES`, or `module:name`.
      input: file or folder of the raw data, as the kind requires.
      input_shape: shape of one example: `[height, width, channels]` of an image, `[d]` of a feature vector.
      num_classes: number of classes, with labels in `[0, num_classes)`; 0 for a regression, with any finite labels.
      validation_fraction: share of each client's examples on which settings are chosen. If the source has test examples
        of its own, the fraction is a share of the remaining examples.
      test_fraction: share of each client's examples that are used for the final figures only; ignored if the source has
        test examples of its own.
      exact_split: make the shares exact for each client (rounded up to whole examples); by default, shares are exact
        only in expectation.
      min_examples_per_client: smallest number of valid examples of a client; smaller clients are left out and counted.
      num_shards: number of output files.
      seed: seed of the splits, and of all other random choices while the data are prepared.
      max_bad_fraction: largest allowed share of unusable examples; if more are unusable, the data are not prepared.
      record_set: name of the set of records that the examples come from: one name for all clients, or a mapping from
        client to name. Two runs with the same name count as runs on the same records, even if the records were prepared
        in different forms. Two runs with different names count as runs on different records, even if the clients' ids
        are equal. Without a name, the content of the prepared examples decides.
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
            raise ValueError("validation_fraction + test_fraction must be below 1, so that training examples remain")

    def build(self, workspace: Path) -> RawData | PreparedSource:
        """Describes the raw data for a job; may first make the folder `workspace` and write files into it.

        Raises:
          ConfigError: a setting does not suit the input.
          DataError: the input is missing or damaged.
        """
        raise NotImplementedError

    def of_more_clients(self, path: Path, manifest: Manifest) -> "SourceSettings":
        """Returns settings that read the raw data of further clients in the form of a prepared dataset.

        Args:
          path: raw data of the further clients, of the same kind.
          manifest: manifest of the prepared dataset.
        """
        return replace(self, input=str(path), min_examples_per_client=1)

    def check_features(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Compares `input_shape` and `num_classes` with the shape and the number of classes of the source.

        Raises:
          ConfigError: the settings differ from the source; the message names both.
        """
        if (self.input_shape, self.num_classes) != (shape, num_classes):
            raise ConfigError(
                f"data.input_shape and data.num_classes are {list(self.input_shape)} and {self.num_classes}; "
                f"{self.kind} has {list(shape)} and {num_classes}"
            )

    def job_options(self, output: Path, *, overwrite: bool) -> "ClientDatasetOptions":
        """Returns the options of the job that writes the client dataset into the folder `output`."""
        names = {field.name for field in dataclasses.fields(ClientDatasetOptions)} & set(self.__struct_fields__)
        shared = {name: getattr(self, name) for name in names}
        return ClientDatasetOptions(**shared, output=output, overwrite=overwrite)


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Options of every job.

    Attributes:
      input: path of the raw data as the user named it, for messages.
      output: folder to write; every worker must see the folder under this name.
      seed: seed of the hashes by which the job makes random choices.
      max_bad_fraction: largest allowed share of unusable input; if more is unusable, the job fails.
      dead_letters: folder in which a failing job keeps its dead letters; default: `<output>.dead_letters`.
      overwrite: replace a finished dataset that was prepared differently.
      exchange: how data get from one stage to the next. `files`: one stage at a time, in bounded memory; a killed job
        resumes where it stopped. `runner`: all stages in one Beam pipeline, for a cluster.
      runner: name of the Beam runner. Do not use DirectRunner: it may download and use another runner, Prism.
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
        """Returns the options that decide the dataset's content, as JSON values; leaves out others, like `runner`."""
        elsewhere = {"input", "output", "dead_letters", "overwrite", "exchange", "runner", "pipeline_args"}
        parameters = {key: value for key, value in dataclasses.asdict(self).items() if key not in elsewhere}
        return json.loads(json.dumps(parameters, default=to_plain))


@dataclasses.dataclass(frozen=True)
class Summary:
    """Outcome of a job; `skipped` is true if the output already contained exactly this dataset."""

    output: Path
    manifest: Manifest
    skipped: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts and the folders as one flat mapping, for printing or JSON."""
        manifest = self.manifest
        held_out = sum(not counts["train"] for counts in manifest.clients.values())
        return {
            "clients": manifest.kept.users,
            **({"clients_without_train_examples": held_out} if held_out else {}),
            **{f"{split}_examples": manifest.num_examples[split] for split in SPLITS},
            "examples_read": manifest.read.examples,
            **{f"dropped ({reason})": tally.examples for reason, tally in sorted(manifest.dropped.items())},
            **{f"left-out clients ({reason})": list(names) for reason, names in sorted(manifest.left_out.items())},
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
        """Returns the entries of `as_dict` as aligned lines of text."""
        return "\n".join(f"{_line_key(key):<48} {_line_value(value)}" for key, value in self.as_dict().items())


# Number of names of left-out clients that are printed; the manifest has all.
_NAMES_SHOWN = 10


def _line_key(key: str) -> str:
    """Returns the key of a line for people: the counts of dropped examples are next to counts of clients."""
    return key.replace("dropped (", "dropped examples (", 1) if key.startswith("dropped (") else key


def _line_value(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    more = f" and {len(value) - _NAMES_SHOWN} more" if len(value) > _NAMES_SHOWN else ""
    return f"{len(value)}: {', '.join(value[:_NAMES_SHOWN])}{more}"


@dataclasses.dataclass(frozen=True)
class ClientRules:
    """Rules by which users become clients.

    Attributes:
      features: shape and types of the written examples.
      examples: rule that decides which examples are valid.
      splits: rule that divides valid examples into training, validation and test.
      min_examples: smallest number of valid examples of a client; smaller clients are left out.
      num_shards: number of shards of the dataset.
    """

    features: FeatureSpec
    examples: ExampleRule
    splits: SplitRule
    min_examples: int
    num_shards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientDatasetOptions(JobOptions):
    """Options of a client-dataset job; `JobOptions` and `SourceSettings` explain the fields that are not listed here.

    Attributes:
      num_shards: number of shard files. A worker needs memory for the users of one shard.
      split_by: `sample`: each client's examples are divided; `user`: all of a client's examples are in one split, so
        that no user has both training and test examples.

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
            raise ConfigError("test_fraction + validation_fraction must be below 1, so that training examples remain")
        if self.exact_split and self.split_by == "user":
            raise ConfigError("exact_split needs split_by sample; split_by user assigns clients to splits by hash")
