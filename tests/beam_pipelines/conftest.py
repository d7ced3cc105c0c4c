import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import ClientDatasetOptions
from beam_pipelines.sources.leaf import Leaf

SHAPE = (2, 2, 1)


def make_user(seed, num_examples=12):
    generator = np.random.default_rng(seed)
    return {
        "x": generator.random((num_examples, 4)).round(6).tolist(),
        "y": generator.integers(0, 3, num_examples).tolist(),
    }


def make_leaf(user_data):
    return {
        "users": list(user_data),
        "num_samples": [len(data["y"]) for data in user_data.values()],
        "user_data": user_data,
    }


def run_leaf(options):
    """Runs the job on a folder of LEAF files."""
    raw = Leaf(kind="leaf", input=str(options.input)).build(Path(options.output))
    return run_client_dataset_job(raw, options)


def contents(dataset):
    """The bytes of every file of a dataset."""
    return {str(path.relative_to(dataset)): path.read_bytes() for path in dataset.rglob("*") if path.is_file()}


def dead_letters(folder):
    """All dead letters in a folder, in the order of its files."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


@pytest.fixture
def write_leaf(tmp_path):
    def write(content, name="all_data_0.json"):
        folder = tmp_path / "raw"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(gzip.compress(encoded, mtime=0) if name.endswith(".gz") else encoded)
        return folder

    return write


@pytest.fixture
def options(tmp_path):
    def build(**changes):
        fields = {
            "input": tmp_path / "raw",
            "output": tmp_path / "clients",
            "input_shape": SHAPE,
            "num_classes": 3,
            "min_examples_per_client": 2,
            "num_shards": 3,
            "max_bad_fraction": 1.0,
        }
        return ClientDatasetOptions(**{**fields, **changes})

    return build
