"""The School data (ILEA exam scores of 139 schools), or synthetic silos of the same shape."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUM_SILOS, NUM_FEATURES = 139, 28
_SCHOOL_SEED = 20230816
# Training examples of the real silos after the split: their quantiles at 0, 1/14, ... 1.
_SIZE_QUANTILES = (17, 28, 37, 48, 57, 65, 75, 82, 90, 103, 114, 125, 143, 160, 200)


class Silos(NamedTuple):
    """The training examples of all silos, padded with zeros to the largest.

    `x` is float32 `[silos, largest, features]`, standardised silo by silo; `y` is float32 `[silos, largest]`, scores
    mapped to [0, 1]; `num_examples` is int32 `[silos]`.
    """

    x: np.ndarray
    y: np.ndarray
    num_examples: np.ndarray


def find_file(num_silos: int = NUM_SILOS) -> Path | None:
    """The real file under the folder named by TFF_PDP_DATA, if it is there and has this number of silos."""
    folder = os.environ.get("TFF_PDP_DATA")
    if not folder or num_silos != NUM_SILOS:
        return None
    file = Path(folder) / "school" / "school.mat"
    return file if file.is_file() else None


def load_silos(num_silos: int = NUM_SILOS) -> Silos:
    """The real silos where `find_file` finds them, synthetic ones otherwise."""
    file = find_file(num_silos)
    silos = _read_training_parts(file) if file else _draw_silos(num_silos)
    num_examples = np.array([len(y) for _, y in silos], np.int32)
    x = np.zeros([len(silos), num_examples.max(), NUM_FEATURES], np.float32)
    y = np.zeros(x.shape[:2], np.float32)
    for index, (silo_x, silo_y) in enumerate(silos):
        x[index, : len(silo_y)] = silo_x
        y[index, : len(silo_y)] = silo_y
    return Silos(x, y, num_examples)


def _read_training_parts(file: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    import scipy.io  # Only the environments that run this workload have it.

    cells = scipy.io.loadmat(str(file))
    rng = np.random.default_rng(_SCHOOL_SEED)
    silos = []
    for x, y in zip(cells["X"][0], cells["Y"][0], strict=True):
        # 80/20, the test part rounded up.
        kept = rng.permutation(len(x))[: len(x) - -(-len(x) // 5)]
        silos.append((_standardise(x[kept].astype(np.float64)), (y[kept, 0].astype(np.float64) - 1) / 69))
    return silos


def _draw_silos(num_silos: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(_SCHOOL_SEED)
    quantiles = np.linspace(0, 1, len(_SIZE_QUANTILES))
    sizes = np.interp(np.linspace(0, 1, num_silos), quantiles, _SIZE_QUANTILES).round().astype(int)
    common = rng.normal(0, 0.03, NUM_FEATURES)
    silos = []
    for size in rng.permutation(sizes):
        x = _standardise(rng.normal(size=[size, NUM_FEATURES]))
        y = 0.5 + x @ (common + rng.normal(0, 0.01, NUM_FEATURES)) + rng.normal(0, 0.1, size)
        silos.append((x, y.clip(0, 1)))
    return silos


def _standardise(x: np.ndarray) -> np.ndarray:
    deviation = x.std(axis=0)
    return (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
