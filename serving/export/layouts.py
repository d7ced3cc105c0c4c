"""How large an export of personal models is, on disk and in a server."""

import dataclasses

import numpy as np

from serving.models import PersonalModels

# The graph and the other small files, and a loaded graph with its session: with TensorFlow 2.14, 90 to 230 KB and 5 to
# 11 MB of a small perceptron and a small convolutional network; large ones have more.
GRAPH_BYTES, LOADED_GRAPH_BYTES = 100_000, 10_000_000
# An entry of the table of ids in memory, beside the id itself: 77 bytes, of a million.
_TABLE_ENTRY_BYTES = 77
_ROW_NUMBER_BYTES, _FLOAT_BYTES = 4, 4


@dataclasses.dataclass(frozen=True)
class LayoutSize:
    """About what an export takes.

    Attributes:
      bytes_on_disk: of all files of one version.
      bytes_in_memory: that a server takes to hold it; while it replaces a version, it holds two.
      bytes_per_example: that a request takes for the weights of each example, while it runs.
    """

    bytes_on_disk: int
    bytes_in_memory: int
    bytes_per_example: int

    def text(self) -> str:
        """The three for a reader."""
        return (
            f"{_megabytes(self.bytes_on_disk)} on disk, {_megabytes(self.bytes_in_memory)} in a server's memory, and "
            f"{_megabytes(self.bytes_per_example)} for each example of a running request"
        )


def estimate(models: PersonalModels) -> LayoutSize:
    """What an export of these models will take; nothing of them is checked."""
    ids = sum(len(client_id.encode()) + 1 for client_id in models.client_ids)
    rows = _ROW_NUMBER_BYTES * len(models.client_ids)
    return LayoutSize(
        bytes_on_disk=models.nbytes + ids + rows + GRAPH_BYTES,
        bytes_in_memory=models.nbytes + ids + rows + _TABLE_ENTRY_BYTES * len(models.client_ids) + LOADED_GRAPH_BYTES,
        bytes_per_example=weight_bytes_per_example(models),
    )


def weight_bytes_per_example(models: PersonalModels) -> int:
    """Bytes that each example of a batch gathers of the stacks, and of the weights that are made from them."""
    gathered = _FLOAT_BYTES * models.values_per_client
    if models.make_weights is None:
        return gathered
    made = sum(int(np.prod(array.shape, dtype=np.int64)) for array in models.model.init(0).values())
    return gathered + _FLOAT_BYTES * made


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.3g} MB" if nbytes < 1e9 else f"{nbytes / 1e9:,.3g} GB"
