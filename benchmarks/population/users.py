"""Writes the raw data of many users: short vectors of ten classes, in LEAF's JSON format.

The number of a user's examples is log-uniform from 1 to 300: the median is 17 and the mean 52, and one user in eight
has more than 150. Every user shifts the classes' means, so that a personal model predicts better than a shared model.
"""

import json
from pathlib import Path

import numpy as np

SHAPE, CLASSES = (4, 4, 1), 10
FEWEST, MOST = 1, 300
_VALUES = int(np.prod(SHAPE))
# Every value that a pixel can have, as JSON.
_PIXELS = np.array([b"%g" % (value / 100) for value in range(101)], object)


def user_name(number: int) -> str:
    """Returns the name of the user with this number."""
    return f"user_{number:06d}"


def num_examples(num_users: int, seed: int = 0) -> np.ndarray:
    """Draws each user's number of examples, int64 `[num_users]`, log-uniform from 1 to 300."""
    drawn = np.random.default_rng([seed, 0]).uniform(np.log(FEWEST), np.log(MOST + 1), num_users)
    return np.floor(np.exp(drawn)).astype(np.int64).clip(FEWEST, MOST)


def user_examples(number: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws one user's examples: hundredths, int64 `[size, 16]` from 0 to 100, and labels, int64 `[size]`."""
    generator = np.random.default_rng([seed, 1, number])
    means = np.random.default_rng([seed, 2]).uniform(20, 80, (CLASSES, _VALUES))
    labels = generator.integers(0, CLASSES, size)
    own = generator.normal(0, 8, (CLASSES, _VALUES))
    x = (means + own)[labels] + generator.normal(0, 15, (size, _VALUES))
    return np.rint(x).clip(0, 100).astype(np.int64), labels


def write_users(folder: Path, sizes: np.ndarray, users_per_file: int, seed: int = 0) -> int:
    """Writes users with these numbers of examples, int64 `[users]`, into files of LEAF's format; returns the bytes."""
    folder.mkdir(parents=True)
    nbytes = 0
    for start in range(0, len(sizes), users_per_file):
        numbers = range(start, min(start + users_per_file, len(sizes)))
        names = [user_name(number) for number in numbers]
        head = json.dumps({"users": names, "num_samples": sizes[numbers.start : numbers.stop].tolist()})
        parts = [head[:-1].encode(), b', "user_data": {']
        for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
            x, labels = user_examples(number, int(sizes[number]), seed)
            rows = b", ".join(b"[" + b", ".join(row) + b"]" for row in _PIXELS[x].tolist())
            parts.append(b', "' * (place > 0) + b'"' * (place == 0) + name.encode() + b'": {"x": [' + rows)
            parts.append(b'], "y": ' + json.dumps(labels.tolist()).encode() + b"}")
        parts.append(b"}}")
        content = b"".join(parts)
        (folder / f"all_data_{start:06d}.json").write_bytes(content)
        nbytes += len(content)
    return nbytes
