"""What several tests of data share: whole preparations, and real data where there are some."""

import os
from pathlib import Path

import pytest
import yaml

from tests.places import CONFIGS
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.prepare import prepare_clients


@pytest.fixture
def prepare(tmp_path):
    """A function of the `data` section's keys that prepares the raw data in `tmp_path/raw` and opens the result."""

    def run(**data):
        content = yaml.safe_load((CONFIGS / "demo.yaml").read_text())
        content |= {"output": str(tmp_path / "run"), "data": {"input": str(tmp_path / "raw"), **data}}
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(content))
        summary = prepare_clients(load_experiment(path), overwrite=True)
        return ClientDataset.open(summary.output, verify=True)

    return run


@pytest.fixture
def real_data():
    """The folder of real data; without one, the test is skipped."""
    root = os.environ.get("TFF_PDP_DATA")
    if not root:
        pytest.skip("TFF_PDP_DATA is not set: no folder with real data")
    return Path(root)
