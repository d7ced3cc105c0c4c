"""Commands after training, and searches, give the same results with workers."""

import json

import pytest

from tests.workers.runs import experiment_of, trained
from tff_pdp.engines.ray_workers.engine import _Results
from tff_pdp.training import train as training
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record.releases import STORE
from tff_pdp.training.search.tune import tune
from tff_pdp.training.train import train

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("lent_workers"), pytest.mark.all]


def figures(summary):
    """A summary without what differs between two runs: ids, times, folders."""
    content = json.loads(json.dumps(summary))
    for row in content["algorithms"].values():
        for name in ("run", "seconds_per_round"):
            row.pop(name, None)
    content.pop("created", None)
    return content


@pytest.mark.parametrize("name", ["mr_mtl", "centaur"])
def test_a_training_is_evaluated_with_workers_and_without(clients, tmp_path, name):
    config = experiment_of(clients, tmp_path / "run", name, 2)
    trained(config, name)
    with_workers = evaluate_experiment(config)
    here = evaluate_experiment(experiment_of(clients, tmp_path / "run", name))
    assert figures(with_workers) == figures(here)


def test_states_stay_at_the_workers(clients, tmp_path, monkeypatch):
    """The head has the server and where states are: no client's state comes by."""

    def bring(self, level, name, rows):
        raise AssertionError(f"{name} of {len(rows)} clients came to the head")

    monkeypatch.setattr(_Results, "bring", bring)
    for name in ("mr_mtl", "centaur"):
        config = experiment_of(clients, tmp_path / "run", name, 2, training__evaluate_every=100)
        with monkeypatch.context() as patch:
            # A validation reads each client's metrics.
            patch.setattr(training, "_validation_metrics", lambda *_: {})
            train(config, name, progress=False)
        files = {path.name for path in (config.algorithm_folder(name) / STORE).glob("*.states")}
        assert any(not file.endswith("_00000.states") for file in files), files


def test_a_run_goes_on_with_workers_and_without(clients, tmp_path):
    for name in ("mr_mtl", "centaur"):
        whole = trained(experiment_of(clients, tmp_path / "whole", name), name)
        for first, then in ((0, 2), (2, 0)):
            folder = tmp_path / f"{first} then {then}"
            trained(experiment_of(clients, folder, name, first), name, stop_before=4)
            assert trained(experiment_of(clients, folder, name, then), name, resume=True) == whole


def test_a_search_selects_the_same_with_workers(clients, tmp_path):
    search = {
        "algorithm": "mr_mtl",
        "values": {"prox_weight": [0.1, 10]},
        "mean_runs": 2.0,
        "score_noise_multiplier": 10.0,
    }
    found = []
    for workers in (0, 2):
        config = experiment_of(clients, tmp_path / f"{workers}", "mr_mtl", workers, tuning={"search": search})
        found.append(tune(config, "mr_mtl", progress=False).selected)
    assert found[0] == found[1]
