"""Reads all examples of a split in a uniformly random order, record by record, even if they exceed the memory."""

from collections.abc import Iterator

import numpy as np

from tff_pdp.data.example_codec import record_extents, record_lengths
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.data.shards import ShardFiles, other_number_of_records, places_in_runs, read_examples
from tff_pdp.errors import ConfigError


def shuffled_epoch(
    features: FeatureSpec, files: ShardFiles, extents: np.ndarray, batch_size: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches of the extents' examples, as `ClientDataset.epoch` does, in the order of one random permutation.

    Memory is needed for one batch, and for 40 bytes per example. Records with labels of at least 128 are longer than
    other records. Extents that may have such records are therefore read once before the first batch, to find where
    records begin. Anyone with the seed knows the order, so no privacy guarantee may treat the order as random sampling.
    `extents` are as in `read_examples`.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    records = _locate_records(features, files, extents)
    order = np.random.default_rng(seed).permutation(len(records))

    starts = range(0, len(order), batch_size)
    return (read_examples(features, files, records[order[start : start + batch_size]]) for start in starts)


def _locate_records(features: FeatureSpec, files: ShardFiles, extents: np.ndarray) -> np.ndarray:
    """Returns every record as an extent of its own: int64 `[n, 4]`."""
    shards, offsets, nbytes, counts = extents.T
    shortest = int(record_lengths(features, np.zeros(1, features.y_dtype))[0])
    first = np.cumsum(counts) - counts
    place_in_extent = places_in_runs(counts)
    records = np.ones((len(place_in_extent), 4), np.int64)
    records[:, 0] = np.repeat(shards, counts)
    records[:, 1] = np.repeat(offsets, counts) + shortest * place_in_extent
    records[:, 2] = shortest
    # No record is shorter, so that an extent of this size has no longer one either.
    for number in np.flatnonzero(nbytes != shortest * counts):
        shard, offset, size, count = extents[number].tolist()
        buffer = files.read(shard, offset, size)
        starts, lengths = record_extents(features, buffer, files.path(shard), offset)
        if len(buffer) != size or len(starts) != count:
            raise other_number_of_records(files.path(shard), len(starts), size, offset, count)
        records[first[number] : first[number] + count, 1:3] = np.stack([offset + starts, lengths], axis=1)
    return records
