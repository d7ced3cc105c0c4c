"""Reads the examples of runs of records, wherever in the shards these lie."""

import numpy as np

from tff_pdp.data.example_codec import decode_examples, record_extents
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.data.shard_files import ShardFiles
from tff_pdp.errors import DataError


def read_examples(features: FeatureSpec, files: ShardFiles, extents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads and decodes extents, one after another, and checks every checksum.

    Args:
      features: shape and types of an example.
      files: the shards.
      extents: int64 `[n, 4]`: shard, first byte, bytes and number of records of each.

    Returns:
      `x` float32 `[examples, *shape]` and `y` `[examples]`, int64 or, for a regression, float32.

    Raises:
      DataError: a shard cannot be read, a record is corrupt, or an extent does not hold as many records as it should;
        names file and byte.
    """
    content = b"".join([files.read(shard, offset, nbytes) for shard, offset, nbytes, _ in extents.tolist()])
    try:
        # One call for everything: it costs as much for one record as for some tens.
        x, y = decode_examples(features, content, "")
    except DataError:
        raise _located_error(features, files, extents) from None
    if not _are_whole(features, content, len(y), extents):
        raise _located_error(features, files, extents)
    return x, y


def _are_whole(features: FeatureSpec, content: bytes, num_records: int, extents: np.ndarray) -> bool:
    """Whether each extent has given its bytes, and its number of records."""
    nbytes, num_examples = extents[:, 2].cumsum(), extents[:, 3].cumsum()
    if len(extents) == 0:
        return True
    if len(content) != nbytes[-1] or num_records != num_examples[-1]:
        return False
    if len(extents) == 1:
        return True
    starts, _ = record_extents(features, content, "")
    return np.array_equal(np.append(starts, len(content))[num_examples], nbytes)


def _located_error(features: FeatureSpec, files: ShardFiles, extents: np.ndarray) -> DataError:
    """The error of the first extent that is not what it should be, by the name of its file."""
    for shard, offset, nbytes, num_examples in extents.tolist():
        path, content = files.path(shard), files.read(shard, offset, nbytes)
        try:
            _, y = decode_examples(features, content, path, offset)
        except DataError as error:
            return error
        if len(content) != nbytes or len(y) != num_examples:
            return DataError(
                f"{path}: {len(y)} whole records in the {nbytes} bytes at byte {offset}, but the index promises "
                f"{num_examples}; restore the file or prepare the data again"
            )
    return DataError(f"{files.path(extents[0, 0])}: changed while it was read; open the dataset again")
