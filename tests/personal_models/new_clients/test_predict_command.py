"""`tff-pdp predict` asks for trained clients, for clients that were added, and for clients that nobody knows."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.personal_models.new_clients.test_personalize import NAMES, SILOS, config_of, save, silo
from tff_pdp.cli import main
from tff_pdp.commands.clients import Predict
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.experiment.prepare import prepare_clients


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A prepared experiment; each request is answered by class 1, and noted."""
    config = config_of(tmp_path, SILOS, "mr_mtl", {}, **{"export.client_ids": "plain"})
    prepare_clients(config)
    requests = []

    def predict(name, client_ids, x):
        requests.append((client_ids[0], x))
        known = client_ids[0] in NAMES
        return SimpleNamespace(answers=np.array([[0.25, 0.75]] * len(x)), personalized=np.array([known] * len(x)))

    monkeypatch.setattr(Predict, "_client", lambda self: SimpleNamespace(predict=predict))
    monkeypatch.setattr("tff_pdp.experiment.config.load_experiment", lambda *_: config)
    return ClientDataset.open(config.clients_folder), requests


def ask(*arguments):
    return main(["predict", "--config", "c.yaml", "--json", *arguments])


def test_a_trained_client_is_asked_about_its_own_test_examples(asked, capsys):
    dataset, requests = asked
    assert ask("--client-id", "south") == 0
    np.testing.assert_array_equal(requests[0][1], dataset.load("south", "test").x[:3])
    said = capsys.readouterr()
    assert [row["predicted"] for row in json.loads(said.out)["predictions"]] == [1, 1, 1]
    assert "note:" not in said.err


def test_for_an_unknown_client_another_ones_examples_are_sent_and_that_is_said(asked, capsys):
    dataset, requests = asked
    assert ask("--client-id", "nobody", "--num-examples", "2") == 0
    assert requests[0][0] == "nobody"
    np.testing.assert_array_equal(requests[0][1], dataset.load("east", "test").x[:2])
    said = capsys.readouterr()
    assert not any(row["personalized"] for row in json.loads(said.out)["predictions"])
    assert "has no client 'nobody', so test examples of 'east' are sent; --examples FILE" in said.err
    assert ask("--client-id", "nobody", "--examples-of", "west") == 0
    assert "note:" not in capsys.readouterr().err
    assert ask("--client-id", "nobody", "--examples-of", "nowhere") == 2
    assert "no client 'nowhere'" in capsys.readouterr().err


def test_an_added_client_is_asked_about_the_examples_that_it_was_added_with(asked, tmp_path, capsys):
    _, requests = asked
    own = silo("harbour", 11)
    path = save(tmp_path / "harbour.npz", own)
    assert ask("--client-id", "harbour", "--examples", str(path)) == 0
    np.testing.assert_array_equal(requests[0][1], own.x[:3].astype(np.float32))
    assert ask("--client-id", "harbour", "--examples", str(path), "--examples-of", "east") == 2
    assert "--examples" in capsys.readouterr().err


def test_serving_before_an_export_says_what_to_do(tmp_path, capsys):
    assert main(["serve", "--model-base-path", str(tmp_path / "none"), "--rest-port", "0", "--grpc-port", "0"]) == 2
    assert "`tff-pdp export` writes it" in capsys.readouterr().err
