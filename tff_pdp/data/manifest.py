"""Describes a client dataset on disk: names of its files, its manifest, and the number of rows one person can change.

<dataset>/
  shards/part-00000-of-00008.tfrecord   tf.Example records by (client id, split); see the index
  index.parquet                         client_id, split, shard, offset, nbytes, num_examples; one row for each extent
                                        (run of records), in ascending order if a client's split has several
  dead_letters/*.jsonl                  records that could not be used, each with a reason
  manifest.json                         this module's `Manifest`
  _SUCCESS                              written last; a folder without it is not a dataset. It has the manifest's sha256
                                        (`sha256sum --check _SUCCESS`); the manifest has the sha256 of the index and of
                                        every shard
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from tff_pdp.errors import DataError
from tff_pdp.files import sync, write_atomically

Unit = Literal["node", "edge"]
RowAdjacency = Literal["replace_one", "replace_special", "add_or_remove_one"]


@dataclasses.dataclass(frozen=True)
class RowInfluence:
    """A bound on the number of rows that one change of a contact graph affects; jobs prove the bound, plans use it.

    Rows made from a contact graph are not independent: a person is in its own row and in the rows of its contacts.
    Protecting single rows would not protect the person.

    Attributes:
      unit: unit of protection. `node` is a person with all its contacts; `edge` is all contacts of one pair of people.
      adjacency: difference between neighbouring graphs. With `replace_one`, a person has other values and contacts.
        With `replace_special`, a person is absent from one graph, which has a row of zeros instead. With
        `add_or_remove_one`, for unit `edge`, a pair's contacts are absent from one graph.
      num_rows: S, the largest number of rows in which the data sets of neighbouring graphs differ, including the
        person's own row. Both data sets have the same number of rows, in the same silos.
      rule: reason why the bound S holds, in one line.
    """

    unit: Unit
    adjacency: RowAdjacency
    num_rows: int
    rule: str

    def checked(self) -> "RowInfluence":
        """Returns this bound if its values are valid; the values may have been edited in the manifest's file.

        Raises:
          DataError: the unit, the adjacency or the number of rows is not valid.
        """
        if self.unit not in get_args(Unit) or self.adjacency not in _ADJACENCIES[self.unit]:
            raise DataError(
                f"manifest.json: row_influence has unit {self.unit!r} and adjacency {self.adjacency!r}; known are node "
                "with replace_one or replace_special, and edge with add_or_remove_one: prepare the data again"
            )
        least = 1 if self.unit == "node" else 0
        if not isinstance(self.num_rows, int) or self.num_rows < least:
            raise DataError(
                f"manifest.json: row_influence has num_rows {self.num_rows!r}, which must be a whole number, at "
                f"least {least}: prepare the data again"
            )
        return self


_ADJACENCIES = {"node": ("replace_one", "replace_special"), "edge": ("add_or_remove_one",)}
FORMAT_VERSION = 2
SPLITS = ("train", "validation", "test")

SHARD_FOLDER = "shards"
DEAD_LETTER_FOLDER = "dead_letters"
INDEX_FILE = "index.parquet"
MANIFEST_FILE = "manifest.json"
SUCCESS_FILE = "_SUCCESS"


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """Shape and type of one example: `x` has `shape` and `x_dtype`, and `y` is a scalar of type `y_dtype`.

    Values of `x` are stored as float32, or as bytes (`x_dtype` is `uint8`) that readers divide by 255; readers
    return float32 in both cases. Labels are int64 in `[0, num_classes)`. `num_classes` is 0 for a regression, whose
    labels are float32.
    """

    shape: tuple[int, ...]
    num_classes: int
    x_dtype: str
    y_dtype: str

    @classmethod
    def of(cls, shape: tuple[int, ...], num_classes: int, x_dtype: str = "float32") -> "FeatureSpec":
        """Builds the spec of examples of this shape, with `num_classes` classes (0 for a regression)."""
        return cls(shape, num_classes, x_dtype, y_dtype="int64" if num_classes else "float32")


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Name (relative to its root), size and sha256 of one file."""

    name: str
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, root: Path, name: str) -> "FileRecord":
        """Reads and hashes the file `root / name`, and returns its record."""
        with open(root / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(name, (root / name).stat().st_size, digest)


@dataclasses.dataclass(frozen=True)
class Tally:
    """A number of users (or clients), and the number of all their examples."""

    users: int = 0
    examples: int = 0


@dataclasses.dataclass(frozen=True)
class RecordCounts:
    """Counts of a table's rows: `kept` and `dropped` (by reason) add up to `read`.

    For an intermediate table, `read` counts the rows from one stage, and `kept` the rows that the next stage used.
    """

    read: int = 0
    kept: int = 0
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The facts about a client dataset that readers and reviewers need, without opening the dataset's shards.

    Attributes:
      features: shape and type of one example.
      seed: seed of the split and the sharding.
      parameters: options of the job that decided the content.
      sources: the input files.
      config_hash: sha256 of format version, parameters and sources; equal hashes mean equal datasets.
      read: numbers of users and examples in the sources.
      kept: numbers of users and examples in the dataset.
      dropped: numbers of users and examples left out, by reason; `kept` and `dropped` add up to `read`.
      num_examples: number of examples in each split.
      clients: for each client id, the number of the client's examples in each split.
      shards: the shard files, in order; the index refers to them by position.
      index: the index file.
      row_influence: bound on the rows that one person can change, if rows are made of a contact graph; None if examples
        are independent.
      rows: counts of rows by table, for input tables and intermediate tables; empty unless examples are made of tables.
      class_names: name of each class, in the order of the labels; None if classes have numbers only.
      left_out: names of the clients that were left out as a whole, by reason.
      treated_as_public: constants that the job took from the examples of all clients without noise, in words, such as
        `classes of 'activity' (6)`. Privacy statements list these constants.
      format_version: version of this layout.
    """

    features: FeatureSpec
    seed: int
    parameters: Mapping[str, Any]
    sources: tuple[FileRecord, ...]
    config_hash: str
    read: Tally
    kept: Tally
    dropped: Mapping[str, Tally]
    num_examples: Mapping[str, int]
    clients: Mapping[str, Mapping[str, int]]
    shards: tuple[FileRecord, ...]
    index: FileRecord
    row_influence: RowInfluence | None = None
    rows: Mapping[str, RecordCounts] = dataclasses.field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    left_out: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    treated_as_public: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    def save(self, dataset: Path) -> None:
        """Writes `manifest.json` into the folder `dataset`; only `mark_finished` makes the folder a dataset."""
        # Indented by msgspec: Python's own indentation takes seconds for 100,000 clients.
        text = json.dumps(msgspec.to_builtins(self), sort_keys=True)
        write_atomically(dataset / MANIFEST_FILE, [msgspec.json.format(text.encode(), indent=1), b"\n"])

    @classmethod
    def load(cls, dataset: Path) -> "Manifest":
        """Reads the manifest of a finished dataset.

        Raises:
          DataError: the folder is missing or unfinished, or its manifest is unreadable, has another version, or has
            changed since it was written (not noticed in datasets of earlier releases).
        """
        if not dataset.is_dir():
            raise DataError(f"{dataset}: no such client dataset; write one with `tff-pdp prepare`")
        if not (dataset / SUCCESS_FILE).is_file():
            raise DataError(
                f"{dataset}: not a finished client dataset ({SUCCESS_FILE} is missing); run `tff-pdp prepare` again"
            )
        path = dataset / MANIFEST_FILE
        try:
            content = path.read_bytes()
            stated = (dataset / SUCCESS_FILE).read_bytes()
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}; restore it or prepare the data again") from None
        if stated and stated != _checksum_line(content):
            raise DataError(
                f"{path}: does not match the sha256 in {SUCCESS_FILE} beside it, so one of the two is damaged; "
                "restore both or prepare the data again"
            )
        try:
            fields = json.loads(content)
            version = fields["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: unreadable manifest ({error!r}); prepare the data again") from error
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path}: format version {version}, but this release reads version {FORMAT_VERSION}; "
                "prepare the data again"
            )
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise DataError(f"{path}: malformed manifest ({error!r}); prepare the data again") from error


def mark_finished(dataset: Path) -> None:
    """Marks a folder that has a manifest as a finished dataset; the mark survives a power cut.

    Assumes: the writers of the dataset's other files have flushed the files to disk.
    """
    write_atomically(dataset / SUCCESS_FILE, [_checksum_line((dataset / MANIFEST_FILE).read_bytes())])
    for folder in (SHARD_FOLDER, DEAD_LETTER_FOLDER):
        if (dataset / folder).exists():
            sync(dataset / folder)
    sync(dataset)


def _checksum_line(manifest: bytes) -> bytes:
    """Returns the line that `sha256sum` prints for a manifest."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST_FILE}\n".encode()
