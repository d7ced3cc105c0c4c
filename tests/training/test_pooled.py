"""Average precision from training to report, of each client and of all together."""

import functools
import html
import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from beam_pipelines.sources.silo_files import SiloArrays, write_silo_arrays
from tests.places import DEMO
from tests.rounding import gamma, network_roundings, probable_gamma
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.processes.compose import client_data_type
from tff_pdp.training.evaluate import client_scores, evaluate_experiment, load_trained, pooled_figures, summary_table
from tff_pdp.training.rounds import evaluate_clients, first_state, ready_states
from tff_pdp.training.run_folder import read_metrics
from tff_pdp.training.train import train

MODEL = {
    "kind": "logistic_regression",
    "focal_gamma": 2.0,
    "focal_alpha": 0.75,
    "metric": "average_precision",
}
SIZES = {"north": 60, "south": 40, "west": 50, "healthy": 20}
ADAPT_STEPS = 3
USERS = {
    "privacy": {
        "kind": "user",
        "batch_size": 16,
        "users_per_round": 2,
        "budgets": {"kind": "one_for_all", "epsilon": 5.0, "delta": 1e-3},
    },
    "algorithms": {"dp_fed_avg_ft": {"adapt_steps": ADAPT_STEPS}},
    "export.algorithm": "dp_fed_avg_ft",
    "tuning": {},
}

# Relative, of figures of single clients and of their means: each is of float64, but for the float32 that it is kept in.
KEPT = gamma(2)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Three silos whose scores are apart, and one in which nobody is positive."""
    rng = np.random.default_rng(0)
    silos = []
    for place, (name, size) in enumerate(SIZES.items()):
        # No two examples are alike: whether two sums of the same terms round alike is up to the processor's kernels.
        x = rng.uniform(-3, 4, (size, 2))
        is_positive = (x[:, 0] + rng.normal(size=size) > place - 1) & (name != "healthy")
        silos.append(SiloArrays(name, x + place, np.where(is_positive, 1, -1)))
    folder = tmp_path_factory.mktemp("pooled")
    write_silo_arrays(folder / "silos.npz", silos)
    config = config_of(folder, folder)
    prepare_clients(config)
    return config.clients_folder


@pytest.fixture
def experiment(prepared, tmp_path):
    """A function that builds an experiment on these silos, under this test's own folder."""
    (tmp_path / "clients").symlink_to(prepared)
    return functools.partial(config_of, prepared.parent, tmp_path)


def config_of(data_folder, output, **overrides):
    settings = {
        "output": str(output),
        "data.input": str(data_folder / "silos.npz"),
        "data.kind": "silo_files",
        "data.input_shape": [2],
        "data.num_classes": 2,
        "data.test_fraction": 0.4,
        "data.exact_split": True,
        "model": MODEL,
        "privacy.batch_size": 16,
        "training.rounds": 2,
        "training.evaluate_every": 1,
        "training.test_only_seed": 1,
        "training.client_parallelism": "loop",
        "algorithms": {"mr_mtl": {"learning_rate": 0.5}},
        **overrides,
    }
    return load_experiment(DEMO, settings)


def by_scikit_learn(method, state, train_data=None):
    """Each client's number of test examples and average precision, and that of all, by its served weights.

    From scores in float64, which lie further apart than rounding moves those of the method: so they rank alike.
    """
    sizes, own, scores, labels, terms = [], [], [], [], []
    for places, states in ready_states(method, state, train_data):
        for place, weights in zip(places, method.process.personalise(state.server_state, states), strict=True):
            test = method.clients.load(method.clients.client_ids[place], "test")
            kernel, bias = (np.asarray(weights[f"dense_0/{part}"], np.float64) for part in ("kernel", "bias"))
            scores.append(test.x.astype(np.float64) @ kernel[:, 0] + bias)
            terms.append(np.abs(test.x) @ np.abs(kernel[:, 0]) + np.abs(bias))
            labels.append(test.y)
            sizes.append(len(test.y))
            own.append(average_precision_score(test.y, scores[-1]) if test.y.any() else math.nan)
    scores, labels, magnitude = np.concatenate(scores), np.concatenate(labels), np.concatenate(terms).max()
    # Steps in which users adapt may round otherwise when they are computed again.
    steps = 0 if train_data is None else ADAPT_STEPS
    a_step = network_roundings(method.model.init(0), max(SIZES.values()))
    rounded = probable_gamma(steps * a_step + 2 + 1) * magnitude
    assert np.diff(np.sort(scores)).min() > 2 * rounded
    return sizes, own, average_precision_score(labels, scores)


def test_silos_are_judged_each_and_together_and_who_cannot_be_is_counted(experiment):
    config = experiment()
    train(config, "mr_mtl", progress=False)
    summary = evaluate_experiment(config)
    json.dumps(summary, allow_nan=False)
    method, state = load_trained(config, "mr_mtl")
    with experiment_engine(config):
        sizes, own, pooled = by_scikit_learn(method, state)
    assert (summary["metric"], summary["higher_is_better"]) == ("average_precision", True)
    row, has_one = summary["algorithms"]["mr_mtl"], ~np.isnan(own)
    assert has_one.sum() == 3
    weighted = np.average(np.array(own)[has_one], weights=np.array(sizes)[has_one])
    assert row["mean"] == pytest.approx(np.nanmean(own), rel=KEPT)
    assert row["mean_over_examples"] == pytest.approx(weighted, rel=KEPT)
    assert row["worst_decile"] == pytest.approx(np.nanmin(own), rel=KEPT)
    assert row["pooled_average_precision"] == pytest.approx(pooled, rel=2 * gamma(3 * sum(sizes), np.float64))
    assert abs(pooled - row["mean"]) > 0.01
    found = {silo["id"]: float(silo["personal"]["mr_mtl"]) for silo in summary["silos"]}
    assert found == pytest.approx(dict(zip(method.clients.client_ids, own, strict=True)), rel=KEPT, nan_ok=True)
    history = read_metrics(config.algorithm_folder("mr_mtl"))
    assert [line["metric"] for line in history] == ["average_precision"] * 2
    assert all(0 < line["nonprivate"]["mean"] < 1 for line in history)
    left_out, together = summary["notes"]
    assert left_out.endswith("figures of test average precision: of 4 silos, 1 without positive test examples.")
    assert together.startswith("Average precision of all silos' test examples ranked together")
    table = summary_table(summary)
    assert table.startswith("test average precision, higher is better")
    assert "all together" in table
    assert f"note: {left_out}" in table
    page = html.unescape((Path(config.output) / "report.html").read_text())
    assert left_out in page
    assert f"MR-MTL {100 * summary['algorithms']['mr_mtl']['pooled_average_precision']:.1f} %" in page
    assert "over 3 silos under" in page


def test_users_are_ranked_after_they_adapt(experiment):
    config = experiment(**USERS)
    method = build_method(config, "dp_fed_avg_ft")
    test, to_adapt = method.examples("test"), method.examples("train")
    with experiment_engine(config):
        state = first_state(method, 1)
        metrics = evaluate_clients(method, state, test, to_adapt)
        found = pooled_figures(method, state, test, to_adapt)
        sizes, own, pooled = by_scikit_learn(method, state, to_adapt)
    personal, shared = ([row[kind]["average_precision"] for row in metrics.values()] for kind in ("personal", "global"))
    np.testing.assert_allclose(personal, own, rtol=KEPT)
    assert found == {"pooled_average_precision": pytest.approx(pooled, rel=2 * gamma(3 * sum(sizes), np.float64))}
    # Before they adapt, all scores are zero.
    assert np.nanmean(own) > np.nanmean(shared) + 0.1


def test_scores_leave_out_padding_and_clients_without_examples(experiment):
    config = experiment()
    method = build_method(config, "mr_mtl")
    padding = {"x": np.full([4, 2], np.nan, np.float32), "y": np.ones(4, np.int64), "num_examples": np.int32(0)}
    nobody = ClientValues.from_members(client_data_type(method.model), [padding] * 4)
    with experiment_engine(config):
        state = first_state(method, 1)
        test = list(client_scores(method, state, method.client_data("test")))
        assert list(client_scores(method, state, nobody)) == []
        nothing = pooled_figures(method, state, nobody)
        everything = pooled_figures(method, state, method.client_data("test"))
    sizes = [method.clients.num_examples(client_id, "test") for client_id in method.clients.client_ids]
    assert [(scores.shape, len(labels)) for scores, labels in test] == [((size,), size) for size in sizes]
    assert math.isnan(nothing["pooled_average_precision"])
    # All scores are zero before the first round.
    share = np.mean(np.concatenate([labels for _, labels in test]))
    assert everything == {"pooled_average_precision": pytest.approx(share)}


def test_a_mean_over_examples_is_not_pooled(experiment):
    config = experiment(model={"kind": "logistic_regression"})
    method = build_method(config, "mr_mtl")
    assert pooled_figures(method, None, None) == {}
