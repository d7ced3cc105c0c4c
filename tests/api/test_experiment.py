"""An experiment as an object: settings as in YAML, one method after the other, results as frames."""

import asyncio
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import tff_pdp as tp
from tests.places import DEMO
from tff_pdp.api import models
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.config import load_experiment
from tff_pdp.settings import read_yaml
from tff_pdp.training import train as training


def sections(**changed):
    return {**read_yaml(DEMO), **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"trainings": {"rounds": 3}},
        {"training": {"rounds": 0}},
        {"training": {"round": 3}},
        {"privacy": {"kind": "silo_exampel"}},
        {"export": {"algorithm": "ditto", "model_name": "digits"}},
        {"title": ""},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_sections_are_checked_as_those_of_a_file(changed):
    with pytest.raises(ConfigError) as of_file:
        load_experiment(DEMO, changed)
    with pytest.raises(ConfigError) as of_object:
        tp.Experiment(**sections(**changed))
    assert str(of_object.value) == str(of_file.value).replace(str(DEMO), "Experiment")


def test_a_missing_section_is_named():
    without = sections()
    del without["privacy"]
    with pytest.raises(ConfigError, match=r"^Experiment: missing key privacy: "):
        tp.Experiment(**without)


def test_numbers_of_numpy_and_paths_are_settings(tmp_path):
    epsilons = np.array([2.0, 4.0])
    made = tp.Experiment(
        **sections(
            output=tmp_path,
            training={"rounds": np.int64(7)},
            privacy={
                "kind": "silo_example",
                "batch_size": np.int32(8),
                "clip_norm": np.float64(0.5),
                "budgets": {"kind": "cycled", "epsilons": epsilons, "delta": 1e-4},
            },
        )
    )
    assert made.config.output == str(tmp_path)
    assert (made.config.training.rounds, made.config.privacy.batch_size) == (7, 8)
    assert made.config.to_dict()["privacy"]["budgets"]["epsilons"] == [2.0, 4.0]


def test_a_file_and_its_sections_are_the_same_experiment():
    overrides = {"training.rounds": 50, "output": "elsewhere"}
    read = tp.Experiment.from_yaml(DEMO, overrides)
    content = sections(output="elsewhere")
    content["training"]["rounds"] = 50
    assert read.config.to_dict() == tp.Experiment(**content).config.to_dict()
    assert read.config.to_dict() == load_experiment(DEMO, overrides).to_dict()
    assert repr(read).startswith("Experiment('Ten silos of handwritten digits', output='elsewhere'")


def test_to_make_an_experiment_imports_no_tensorflow():
    code = "import sys, tff_pdp; tff_pdp.Experiment.from_yaml('demo'); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


CALLS = {
    "train": lambda one: one.train(),
    "evaluate": lambda one: one.evaluate(),
    "report": lambda one: one.report(),
    "personal_weights": lambda one: one.personal_weights("silo_00"),
    "predict": lambda one: one.predict(np.zeros((1, 8, 8, 1)), "silo_00"),
    "spent": lambda one: one.spent(),
    "export": lambda one: one.export(),
    "sweep": lambda one: one.sweep({"algorithms.mr_mtl.prox_weight": [1.0]}),
    "client_ids": lambda one: one.client_ids,
}


@pytest.mark.parametrize("name", CALLS)
def test_what_comes_before_preparation_says_so(name, tmp_path):
    with pytest.raises(ConfigError, match=r"has no client dataset yet: call prepare\(\) first$"):
        CALLS[name](tp.Experiment.from_yaml(DEMO, {"output": tmp_path}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("train", "sweep", "client_ids")])
def test_what_comes_before_training_says_so(name, build):
    with pytest.raises(ConfigError, match=r"call train\(\) first$"):
        CALLS[name](build())


def test_a_method_that_the_experiment_lacks_is_named(trained):
    for call in (trained.train, lambda name: trained.personal_weights("silo_00", name)):
        with pytest.raises(ConfigError, match=r"^'ditto' is not in this experiment, which has: local_only, mr_mtl$"):
            call("ditto")


def test_preparation_counts_examples_and_is_done_once(client_folder, tmp_path):
    made = tp.Experiment.from_yaml(
        DEMO, {"output": tmp_path, "data.input": client_folder.parent / "leaf", "data.num_shards": 1}
    )
    counts = made.prepare()
    manifest = ClientDataset.open(tmp_path / "clients").manifest
    assert counts.index.name == "client"
    assert counts.to_dict("index") == {client: dict(own) for client, own in manifest.clients.items()}
    written = (tmp_path / "clients" / "manifest.json").stat().st_mtime_ns
    pd.testing.assert_frame_equal(made.prepare(), counts)
    assert (tmp_path / "clients" / "manifest.json").stat().st_mtime_ns == written
    assert made.client_ids == tuple(counts.index)


def test_training_returns_the_validation_metrics_and_is_done_once(trained):
    history = trained.train(progress=False)
    assert history.index.names == ["algorithm", "round"]
    assert history.index.to_list() == [(name, number) for name in ("local_only", "mr_mtl") for number in (1, 2, 3)]
    assert history["mean"].between(0, 1).all() and (history["seconds"] > 0).all()
    pd.testing.assert_frame_equal(trained.train("mr_mtl", progress=False), history.loc[["mr_mtl"]])


def test_figures_of_methods_are_those_of_clients(trained):
    methods, clients = trained.evaluate(), trained.evaluate(by="client")
    assert methods.index.to_list() == ["local_only", "mr_mtl"]
    for name, own in clients.groupby("algorithm"):
        assert methods.loc[name, "mean"] == pytest.approx(own["personal"].mean(), rel=1e-12)
        assert methods.loc[name, "worst_decile"] == pytest.approx(own["personal"].min(), rel=1e-12)
        weighted = np.average(own["personal"], weights=own["num_test"])
        assert methods.loc[name, "mean_over_examples"] == pytest.approx(weighted, rel=1e-12)
    assert clients.loc["local_only", "shared"].isna().all()
    page = trained.report()
    assert page.read_text().count("<html") == 1 and page.parent == page.parent.parent / trained.config.output


@pytest.mark.parametrize("kept_bytes", [2**26, 0], ids=["all together", "one at a time"])
def test_predictions_are_those_that_the_metrics_are_of(trained, monkeypatch, kept_bytes):
    monkeypatch.setattr(models, "_KEPT_BYTES", kept_bytes)
    trained._forget()
    measured = trained.evaluate(by="client")["personal"]
    clients = ClientDataset.open(trained.config.clients_folder)
    for client_id in trained.client_ids:
        test = clients.load(client_id, "test")
        found = trained.predict(test.x, client_id)
        assert (found["predicted"].to_numpy() == test.y).mean() == pytest.approx(measured["mr_mtl", client_id])
        # A linear model, worked out in float64.
        weights = trained.personal_weights(client_id)
        logits = (
            test.x.reshape(len(test.x), -1).astype(np.float64) @ weights["dense_0/kernel"] + weights["dense_0/bias"]
        )
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        everything = trained.predict(test.x, client_id, probabilities=True)
        np.testing.assert_allclose(everything.to_numpy(), shares, rtol=1e-4)
        np.testing.assert_array_equal(found["probability"], everything.max(axis=1))
    assert not np.array_equal(*(trained.personal_weights(one)["dense_0/bias"] for one in trained.client_ids[:2]))


def test_weights_are_copies_and_unknown_clients_have_a_model(trained):
    (name, array), *_ = trained.personal_weights("silo_01").items()
    array += 1
    assert not np.array_equal(trained.personal_weights("silo_01")[name], array)
    every = [trained.personal_weights(client_id)[name].astype(np.float64) for client_id in trained.client_ids]
    # Silos' models are private, and so is their mean.
    np.testing.assert_allclose(trained.personal_weights(None)[name], np.mean(every, axis=0), atol=1e-6)
    alone = trained.personal_weights("silo_01", "local_only")[name]
    assert not np.array_equal(alone, trained.personal_weights("silo_01")[name])


def test_a_frame_keeps_its_index_and_no_example_is_an_empty_answer(trained):
    frame = pd.DataFrame(np.zeros((2, 3)), index=["a", "b"])
    with pytest.raises(
        DataError, match=r"^x has shape \(2, 3\), but the model takes examples of shape \(n, 8, 8, 1\)$"
    ):
        trained.predict(frame, "silo_00")
    with pytest.raises(DataError, match=r"^x must hold numbers: "):
        trained.predict([["a"]], "silo_00")
    none = trained.predict(np.zeros((0, 8, 8, 1)), "silo_00")
    assert (len(none), list(none.columns)) == (0, ["predicted", "probability"])


@pytest.mark.parametrize("call", ["personal_weights", "predict"])
def test_an_unknown_client_is_told_the_nearest_ids(trained, call):
    arguments = [np.zeros((1, 8, 8, 1))] if call == "predict" else []
    with pytest.raises(DataError, match=r"^no client 'silo_1' among 3 clients; the nearest ids are silo_01, silo_0"):
        getattr(trained, call)(*arguments, "silo_1")
    with pytest.raises(DataError, match=r"ids are silo_00, silo_01, silo_02, \.\.\.$"):
        getattr(trained, call)(*arguments, "ward")


def test_models_of_a_run_that_was_replaced_are_dropped(build):
    made = build()
    made.train(progress=False)
    before = made.personal_weights("silo_00")
    # As another process does.
    training.train(made.config, "mr_mtl", overwrite=True, progress=False)
    after = made.personal_weights("silo_00")
    assert not all(np.array_equal(before[name], after[name]) for name in before)


def test_advice_names_arguments_and_no_options_of_commands(build):
    made = build()
    made.train(progress=False)
    with pytest.raises(ConfigError, match="overwrite=True") as of_settings:
        build(training__rounds=1).train(progress=False)
    with pytest.raises(ConfigError, match="resume=True or overwrite=True") as of_run:
        made.train(resume=False, progress=False)
    assert not any("--" in str(one.value) for one in (of_settings, of_run))


@pytest.mark.parametrize("engine", ["inprocess", "native"])
def test_everything_runs_inside_a_running_event_loop(build, engine):
    parallelism = "auto" if engine == "native" else "loop"
    made = build(training__engine=engine, training__client_parallelism=parallelism)

    async def cell():
        """A cell of a notebook is run like this."""
        assert asyncio.get_running_loop().is_running()
        made.prepare()
        made.train(progress=False)
        return made.evaluate(), made.predict(np.zeros((1, 8, 8, 1)), "silo_00"), made.spent()

    results, predicted, spent = asyncio.run(cell())
    assert (len(results), len(predicted)) == (1, 1) and len(spent) == 6


def test_a_stopped_training_goes_on(build, monkeypatch):
    made = build(training__rounds=4, training__checkpoint_every=1)
    run_round = training.run_round

    def stop_at_the_third(method, state, round_number, data):
        if round_number == 3:
            raise KeyboardInterrupt
        return run_round(method, state, round_number, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "run_round", stop_at_the_third)
        made.train(progress=False)
    with pytest.raises(ConfigError, match=r"^mr_mtl has 2 of 4 rounds: call train\(\) first$"):
        made.evaluate()
    stopped = made.spent().loc["mr_mtl"]
    # The record covers the round that was stopped.
    assert (stopped["epsilon_spent"] > 0).all() and (stopped["epsilon_left"] > 0).all()
    assert made.train(progress=False).index.to_list() == [("mr_mtl", 3), ("mr_mtl", 4)]
    assert (made.spent().loc["mr_mtl", "epsilon_spent"] > stopped["epsilon_spent"]).all()
