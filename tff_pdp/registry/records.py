"""Computes digests of records under a secret key; equal records have equal digests.

A record is identified by its features alone, bit for bit, and not by its label. A row of a contact graph is identified
by its name, which identifies a person and a window in time.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE, SPLITS, Manifest
from tff_pdp.data.shards import places_in_runs

KEY_BYTES = 32
# A file has eight bytes of digest for each record and each client. Two different records have the same digest with a
# probability of 2**-64, and then count as one: an overlap may be found where there is none, but none is missed.
_DIGEST = np.dtype("<u8")
# Number of examples whose digests are computed together.
_EXAMPLES_AT_A_TIME = 1 << 16
# Options of a job that decide which records there are and in which files, but not the content of a record.
_NOT_FORM = frozenset(
    {
        "exact_split",
        "max_bad_fraction",
        "min_examples_per_client",
        "num_shards",
        "seed",
        "split_by",
        "test_fraction",
        "validation_fraction",
        # How pooled images are divided among clients.
        "classes_per_client",
        "client_feature",
        "concentration",
        "images_per_client",
        "min_images",
        "num_clients",
        "partition",
        "shards_per_client",
        "test_partition",
        "test_split",
        "train_split",
        "training_images",
    }
)
# Rows of a contact graph hold something of other people, whose names depend on the seed, in whichever split they are;
# rotations and masks of silos follow from the seed.
_NOT_FORM_OF_ROWS = frozenset({"max_bad_fraction", "num_shards"})
_SEEDED = ("rotated_mnist",)
# Kinds of raw data whose clients are artificial.
_ARTIFICIAL = ("fashion_mnist", "partitioned_images", "rotated_mnist")
# The one partition whose clients are not artificial: a feature of each example names the owner.
_BY_FEATURE = "feature"


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of a run: digests under one key, grouped by client.

    Attributes:
      dataset: digest of the data set that contains the records; empty for records outside a data set.
      form: digest of the settings by which raw data were converted to records.
      sources: digests of the files of raw data.
      are_named: whether a client's name identifies the owner of the records. Otherwise clients are artificial, and the
        same name may have other records if the raw data are divided differently.
      clients: uint64 `[clients]`, digests of the clients' ids.
      first: int64 `[clients + 1]`, position of each client's first record, then the number of all records.
      digests: uint64 `[records]`, digests of the records.
    """

    dataset: str
    form: str
    sources: tuple[str, ...]
    clients: np.ndarray
    first: np.ndarray
    digests: np.ndarray
    are_named: bool = True

    def to_bytes(self) -> bytes:
        """Serialises the records, about eight bytes for each record."""
        names = ("dataset", "form", "sources", "are_named")
        header = json.dumps({name: getattr(self, name) for name in names})
        file = io.BytesIO()
        np.savez(
            file,
            header=np.frombuffer(header.encode(), np.uint8),
            clients=self.clients.astype(_DIGEST),
            first=self.first.astype("<i8"),
            digests=self.digests.astype(_DIGEST),
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Records":
        """Parses the result of `to_bytes`; the caller must have checked that the bytes are undamaged."""
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            own = {name: arrays[name] for name in ("clients", "first", "digests")}
            return cls(**{**header, "sources": tuple(header["sources"])}, **own)


@dataclasses.dataclass(frozen=True)
class RecordKey:
    """The secret key of a registry's digests: keyed BLAKE2b, eight bytes for each record or client.

    Guarantee: without the key, digests reveal nothing about a record except whether it equals another record.
    Assumes: the key stays secret. A holder of the key can test whether a known record is among the records of a run.
    """

    secret: bytes = dataclasses.field(repr=False)

    def fingerprint(self) -> str:
        """Returns 32 hexadecimal digits that identify the key and reveal nothing else about the key."""
        return self._digest(b"", b"fingerprint", 16).hex()

    def name(self, purpose: str, content: bytes) -> str:
        """Returns the digest of `content` as 32 hexadecimal digits; digests for different purposes differ."""
        return self._digest(content, purpose.encode(), 16).hex()

    def clients(self, client_ids: Iterable[str]) -> np.ndarray:
        """Computes digests of clients' ids; returns uint64 `[clients]`."""
        return self._digests((client_id.encode() for client_id in client_ids), b"client")

    def examples(self, x: np.ndarray) -> np.ndarray:
        """Computes digests of examples from features, float32 `[examples, ...]`; returns uint64 `[examples]`."""
        # Minus zero is zero.
        rows = np.ascontiguousarray(x, "<f4") + np.float32(0)
        everything, width = rows.tobytes(), rows.itemsize * math.prod(rows.shape[1:])
        return self._digests([everything[row * width : (row + 1) * width] for row in range(len(rows))], b"record")

    def rows(self, names: np.ndarray) -> np.ndarray:
        """Computes digests of rows of contact graphs from row names, `S32` `[rows]`; returns uint64 `[rows]`."""
        return self._digests(names.tolist(), b"row")

    def _digests(self, contents: Iterable[bytes], purpose: bytes) -> np.ndarray:
        joined = b"".join([self._digest(content, purpose, _DIGEST.itemsize) for content in contents])
        return np.frombuffer(joined, _DIGEST).astype(np.uint64)

    def _digest(self, content: bytes, purpose: bytes, size: int) -> bytes:
        return hashlib.blake2b(content, key=self.secret, digest_size=size, person=purpose).digest()


def name_of_dataset(key: RecordKey, dataset: ClientDataset, splits: Sequence[str]) -> str:
    """Returns the name of the registry's file with digests of some splits of a data set."""
    manifest = (dataset.path / MANIFEST_FILE).read_bytes()
    return key.name("splits", json.dumps(sorted(splits_of(dataset, splits))).encode() + manifest)


def splits_of(dataset: ClientDataset, splits: Sequence[str]) -> Sequence[str]:
    """Returns the splits whose records a run on `splits` uses: all splits if the data set is a contact graph."""
    return splits if dataset.manifest.row_influence is None else SPLITS


def records_of_dataset(key: RecordKey, dataset: ClientDataset, splits: Sequence[str]) -> Records:
    """Computes digests of all records in some splits of a data set; reads every record once.

    Raises:
      DataError: a record is damaged.
    """
    name = key.name("dataset", (dataset.path / MANIFEST_FILE).read_bytes())
    records = records_of_clients(key, dataset, dataset.client_ids, splits_of(dataset, splits))
    return dataclasses.replace(records, dataset=name)


def records_of_clients(
    key: RecordKey, dataset: ClientDataset, client_ids: Sequence[str], splits: Sequence[str]
) -> Records:
    """Computes digests of the records of some clients in some splits; errors are as in `records_of_dataset`."""
    manifest = dataset.manifest
    is_rows = manifest.row_influence is not None
    is_seeded = is_rows or manifest.parameters.get("source") in _SEEDED
    not_form = _NOT_FORM_OF_ROWS if is_seeded else _NOT_FORM
    form: dict[str, Any] = {name: value for name, value in manifest.parameters.items() if name not in not_form}
    features = dataclasses.asdict(manifest.features)
    digests_of = _digests_of_rows if is_rows else _digests_of_examples
    sizes, digests = digests_of(key, dataset, client_ids, splits)
    return Records(
        dataset="",
        form=key.name("form", json.dumps([features, form], sort_keys=True).encode()),
        sources=tuple(sorted({key.name("source", source.encode()) for source in _raw_files(manifest)})),
        are_named=_are_named(manifest),
        **_grouped(key, client_ids, sizes, digests),
    )


def _digests_of_rows(
    key: RecordKey, dataset: ClientDataset, client_ids: Sequence[str], splits: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each client's rows, and the rows' digests, client by client and split by split."""
    parts = [[key.rows(dataset.example_ids(client_id, split)) for split in splits] for client_id in client_ids]
    sizes = np.array([sum(map(len, own)) for own in parts], np.int64)
    return sizes, np.concatenate([np.zeros(0, np.uint64), *itertools.chain.from_iterable(parts)])


def _digests_of_examples(
    key: RecordKey, dataset: ClientDataset, client_ids: Sequence[str], splits: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each client's examples, and the examples' digests, ordered as in `_digests_of_rows`."""
    position = {client_id: place for place, client_id in enumerate(dataset.client_ids)}
    places = np.array([position[client_id] for client_id in client_ids], np.int64)
    sizes = np.stack([dataset.sizes(split)[places] for split in splits], axis=1)
    stops = sizes.cumsum().reshape(sizes.shape)
    digests = np.empty(sizes.sum(), np.uint64)
    for number, split in enumerate(splits):
        # A client that is larger is read alone.
        parts = sizes[:, number].cumsum() // _EXAMPLES_AT_A_TIME
        for part in np.split(np.arange(len(places)), np.flatnonzero(np.diff(parts)) + 1):
            counts = sizes[part, number]
            rows = np.repeat(stops[part, number] - counts, counts) + places_in_runs(counts)
            digests[rows] = key.examples(dataset.load_many(places[part], split).x)
    return sizes.sum(axis=1), digests


def _are_named(manifest: Manifest) -> bool:
    """Checks if a client's name identifies the owner of the client's records."""
    by_feature = manifest.parameters.get("partition", _BY_FEATURE) == _BY_FEATURE
    return by_feature and manifest.parameters.get("source") not in _ARTIFICIAL


def _raw_files(manifest: Manifest) -> list[str]:
    """Lists digests of the files that a data set was made of: files that the job read, and their own sources."""
    own = [source.sha256 for source in manifest.sources]
    # Images in very many files have one digest of all.
    own += [manifest.parameters[name] for name in ("images_sha256",) if name in manifest.parameters]
    origin = manifest.parameters.get("origin", ())
    return own + [one.get("sha256", json.dumps(one, sort_keys=True)) for one in origin]


def records_of_examples(key: RecordKey, client_ids: Sequence[str], features: Sequence[np.ndarray]) -> Records:
    """Computes digests of examples outside a data set; `features` has float32 `[examples, ...]` for each client."""
    digests = np.concatenate([np.zeros(0, np.uint64), *map(key.examples, features)])
    return Records("", "", (), **_grouped(key, client_ids, np.array(list(map(len, features)), np.int64), digests))


def _grouped(key: RecordKey, client_ids: Sequence[str], sizes: np.ndarray, digests: np.ndarray) -> dict[str, Any]:
    return {
        "clients": key.clients(client_ids),
        "first": np.concatenate([[0], sizes.cumsum()]).astype(np.int64),
        "digests": digests,
    }
