"""Commands after training, searches and reproductions give the same results with workers."""

import contextlib
import json

import numpy as np
import pytest

from serving.export.stored_models import read_models
from tests.reproduce.reproduce_support import build_reproduction, write_school
from tests.reproduce.settings_support import setting_changed
from tests.workers.runs import STEPS, experiment_of, trained
from tff_pdp.engines.ray_workers.engine import _Results
from tff_pdp.experiment.build import build_method, build_model
from tff_pdp.experiment.config import Workers
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.personal_models.new_clients.options import FitOptions
from tff_pdp.personal_models.new_clients.personalize import personalize
from tff_pdp.reproduce.inputs import digest_of
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.run import JobRunner
from tff_pdp.training import train as training
from tff_pdp.training.checkpoint import load_latest
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record.releases import CHECKPOINTS, STORE
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
            patch.setattr(training, "_validation_metrics", lambda *_: None)
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


@pytest.mark.usefixtures("one_fresh_process")
@pytest.mark.parametrize(
    ("name", "paid"), [("mr_mtl", {"epsilon": 4.0, "delta": 1e-3}), ("centaur", {})], ids=["silos", "users"]
)
def test_new_clients_are_fitted_alike_after_a_training_with_workers(clients, tmp_path, monkeypatch, name, paid):
    """Exports have the same bits, those with a new client, too."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 8, 8, 1)).astype(np.float32), rng.integers(0, 10, 40)
    np.savez(tmp_path / "new.npz", x=x, y=y)
    # A fit draws from the operating system, whatever the seed of the training.
    monkeypatch.setattr(RunKey, "from_entropy", classmethod(lambda cls: cls.from_test_seed(3)))
    found = []
    for workers in (0, 2):
        config = experiment_of(clients, tmp_path / f"{workers}", name, workers, export__client_ids="plain")
        trained(config, name)
        exported = export_experiment(config).version
        options = FitOptions(steps=5, learning_rate=0.1, batch_size=8, **paid)
        added = personalize(config, tmp_path / "new.npz", ["new"], options, progress=False).version
        found.append([models_of(config, version) for version in (exported, added)])
    assert found[0] == found[1]
    before, after = found[0]
    assert after["ids"] == [*before["ids"], "new"]


def models_of(config, version):
    """All that an export answers with: ids, rows and weights, these as bytes."""
    models = read_models(version, build_model(config))
    arrays = {**models.shared, **{f"stacked {key}": stack for key, stack in models.stacked.items()}}
    return {
        "ids": list(models.client_ids),
        "rows": models.rows.tolist(),
        **{key: (array.shape, array.tobytes()) for key, array in arrays.items()},
    }


def test_lambda_is_set_alike_from_what_workers_release(clients, tmp_path):
    settings = {
        "algorithms": {"mr_mtl": {**STEPS, "prox_weight": "auto"}},
        "training__rounds": 40,
        "training__evaluate_every": 40,
        "training__checkpoint_every": 20,
    }
    config = experiment_of(clients, tmp_path / "here", "mr_mtl", **settings)
    whole = trained(config, "mr_mtl")
    at_workers = experiment_of(clients, tmp_path / "there", "mr_mtl", 2, **settings)
    trained(at_workers, "mr_mtl", stop_before=30)
    assert trained(at_workers, "mr_mtl", resume=True) == whole
    # Lambda has been set from what silos have released.
    hook = load_latest(config.algorithm_folder("mr_mtl") / CHECKPOINTS).hook
    first = build_method(config, "mr_mtl").hook.init()
    assert not np.array_equal(hook["prox_weights"], first["prox_weights"])


def test_a_reproduction_has_the_same_rows_with_workers(tmp_path):
    path = write_school(tmp_path / "school.mat")
    methods = ("mr_mtl", "mr_mtl_auto", "ifca")
    found = []
    with setting_changed("school", {"training.client_parallelism": "loop"}):
        for workers in (None, Workers(num_workers=2)):
            reproduction = build_reproduction(
                tmp_path / f"{workers and workers.num_workers}",
                scale_name="small",
                methods=methods,
                data_input=path,
                data_digest=digest_of(path),
                workers=workers,
            )
            jobs = [Job("default", method, epsilon, 0) for method in methods for epsilon in (3.0, 6.0)]
            with contextlib.closing(JobRunner(reproduction)) as runner:
                outcomes = [runner(job) for job in jobs]
            # The sweep takes a row for another's where these are equal.
            found.append([(reproduction.digest(one.job), one.row, one.infeasible) for one in outcomes])
    assert found[0] == found[1]
    assert sum(row is not None for _, row, _ in found[0]) >= 4
