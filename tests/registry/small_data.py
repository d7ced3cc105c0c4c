"""Client datasets of a few records, of which tests choose which ones are the same."""

import dataclasses

import numpy as np

from tests.data.written_clients import write_clients
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import FeatureSpec, FileRecord, Manifest, mark_finished

FEATURES = FeatureSpec.of((3,), 2)


def records(first, last):
    """The records of these numbers: float32 `[n, 3]`."""
    return np.stack([np.random.default_rng(number).normal(size=3) for number in range(first, last)]).astype(np.float32)


def write_dataset(folder, clients, *, parameters=None, sources=(), row_influence=None):
    """A dataset of training records by client.

    Args:
      folder: where.
      clients: by client id, float32 `[n, 3]`.
      parameters: of the manifest.
      sources: sha256 of the raw files in the manifest.
      row_influence: of the manifest.
    """
    extents = [(client, "train", 0, x, np.zeros(len(x), np.int64)) for client, x in sorted(clients.items())]
    write_clients(folder, FEATURES, extents)
    manifest = dataclasses.replace(
        Manifest.load(folder),
        parameters=parameters or {},
        sources=tuple(FileRecord("raw", 1, sha256) for sha256 in sources),
        row_influence=row_influence,
    )
    manifest.save(folder)
    mark_finished(folder)
    return ClientDataset.open(folder)
