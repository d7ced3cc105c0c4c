"""Workers that see no folder of the head: examples and states lie at a URL, and results are those of one process."""

import shutil

import pytest

from tests.workers.file_server import serving
from tests.workers.runs import experiment_of, trained
from tff_pdp.training.record.releases import STORE

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("lent_workers"), pytest.mark.all]


@pytest.fixture
def server(clients, tmp_path):
    """A server with a copy of the client dataset, in `/clients`."""
    shutil.copytree(clients, tmp_path / "served" / "clients")
    with serving(tmp_path / "served") as server:
        yield server


@pytest.mark.parametrize("name", ["mr_mtl", "centaur"])
def test_examples_and_states_at_a_url_change_nothing(clients, tmp_path, server, name):
    at_url = {"num_workers": 2, "clients": f"{server.url}/clients", "states": f"{server.url}/states"}
    whole = trained(experiment_of(clients, tmp_path / "here", name), name)
    config = experiment_of(clients, tmp_path / "there", name, training__workers=at_url)
    trained(config, name, stop_before=4)
    assert trained(config, name, resume=True) == whole
    assert server.count("OPEN", "/clients/") and server.count("OPEN", "/states/")
    # A file for each part of the clients in a round.
    assert server.count("CREATE", "_00001.states")
    assert not list((config.algorithm_folder(name) / STORE).glob("*.states"))
    # Files that no client's newest state is in are gone.
    assert server.count("DELETE", ".states")
