"""A client dataset at an fsspec URL: the same examples, and the same refusals, as in a folder."""

import fsspec
import numpy as np
import pytest

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE, SPLITS
from tff_pdp.errors import DataError

URL = "memory://clients_at_url"


@pytest.fixture
def memory(client_folder):
    """A copy of a prepared dataset in fsspec's file system in memory."""
    system = fsspec.filesystem("memory")
    for path in client_folder.rglob("*"):
        if path.is_file():
            system.pipe_file(f"{URL}/{path.relative_to(client_folder)}", path.read_bytes())
    yield system
    system.rm(URL, recursive=True)


def test_examples_are_those_of_the_folder(client_folder, memory):
    here, there = ClientDataset.open(client_folder), ClientDataset.open(URL)
    assert there.client_ids == here.client_ids
    for split in SPLITS:
        np.testing.assert_array_equal(there.sizes(split), here.sizes(split))
        places = np.arange(len(here.client_ids))[::-1]
        one, other = here.load_many(places, split), there.load_many(places, split)
        np.testing.assert_array_equal(one.x, other.x)
        np.testing.assert_array_equal(one.y, other.y)
    assert (there.path / MANIFEST_FILE).read_bytes() == (client_folder / MANIFEST_FILE).read_bytes()


def test_a_missing_dataset_is_refused():
    with pytest.raises(DataError, match="memory://nowhere"):
        ClientDataset.open("memory://nowhere")


def test_a_damaged_shard_is_refused_by_its_url(memory):
    name = next(path for path in memory.find(URL) if path.endswith(".tfrecord") and memory.size(path))
    content = bytearray(memory.cat_file(name))
    content[len(content) // 2] ^= 1
    memory.pipe_file(name, bytes(content))
    dataset = ClientDataset.open(URL)
    with pytest.raises(DataError, match="memory://"):
        for split in SPLITS:
            dataset.load_many(np.arange(len(dataset.client_ids)), split)
