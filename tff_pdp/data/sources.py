"""Raw federated data that needs no download."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from beam_pipelines.sources.partition import dirichlet_partition

DIGITS_SHAPE = (8, 8, 1)
DIGITS_CLASSES = 10
_MAX_INTENSITY = 16.0


def write_digits_leaf(
    folder: str | os.PathLike[str], num_clients: int, concentration: float, seed: int, min_examples: int = 10
) -> Path:
    """Writes scikit-learn's 1,797 real 8x8 digits, divided among silos, as a LEAF JSON file.

    Prepare the folder with `input_shape=(8, 8, 1)` and `num_classes=10`. Pixels are scaled to [0, 1], ink bright.

    Args:
      folder: where to write; made if missing.
      num_clients: number of silos, named `silo_00`, `silo_01`, ...
      concentration: how alike the silos' label mixes are; see `dirichlet_partition`.
      seed: the same arguments and seed give the same bytes.
      min_examples: the fewest digits a silo may hold.

    Returns:
      The file written, `folder/all_data_0.json.gz`.

    Raises:
      DataError: the division asked for is impossible.
    """
    images, labels = load_digits(return_X_y=True)
    pixels = np.asarray(images) / _MAX_INTENSITY
    labels = np.asarray(labels)
    parts = dirichlet_partition(labels, num_clients, concentration, seed, min_examples)
    user_data = {
        f"silo_{silo:02d}": {"x": pixels[indices].tolist(), "y": labels[indices].tolist()}
        for silo, indices in enumerate(parts)
    }
    leaf = {"users": list(user_data), "num_samples": [len(part) for part in parts], "user_data": user_data}
    path = Path(folder) / "all_data_0.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    # A fixed time stamp: gzip would otherwise put the hour of writing into the bytes.
    path.write_bytes(gzip.compress(json.dumps(leaf).encode("utf-8"), mtime=0))
    return path
