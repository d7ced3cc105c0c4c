"""Silos that count by their budgets in means, as in WeiAvg, and noise that suits the least budget, as in Minimum."""

import math
from pathlib import Path

import numpy as np
import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.train import train

FED_AVG = {"algorithms": {"fed_avg": {}}, "export__algorithm": "fed_avg"}


def budgets(*epsilons, **others):
    return {"kind": "cycled", "epsilons": list(epsilons), "delta": 1e-4, **others}


def test_equal_budgets_train_the_bits_of_fed_avg(experiment):
    # An epsilon whose multiples are no floating-point numbers.
    given = {**FED_AVG, "privacy__budgets": budgets(2.3), "training__rounds": 3}
    states = [
        train(experiment(weighting, **given, training__weighting=weighting), "fed_avg", progress=False)
        for weighting in ("uniform", "budget")
    ]
    one, other = ([state.server_state["algorithm"]["weights"], *state.client_states] for state in states)
    assert one[0].keys() == other[0].keys() and len(one[0]) > 1
    for name, values in one[0].items():
        np.testing.assert_array_equal(values, other[0][name])
    assert np.abs(one[0]["dense_0/kernel"]).max() > 0


def test_weights_are_epsilons_over_their_mean(experiment):
    given = {**FED_AVG, "privacy__budgets": budgets(1, 2, 6), "training__weighting": "budget"}
    method = build_method(experiment(**given), "fed_avg")
    key = RunKey.from_test_seed(3)
    assert [one["weight"] for one in method.client_params(key, 1)] == [np.float32(w) for w in (1 / 3, 2 / 3, 2)]
    least = build_method(experiment("least", **given, privacy__budgets__level="minimum"), "fed_avg")
    # The noise is that of the least budget, for each silo's size; a silo's say is that of its own.
    assert [one["weight"] for one in least.client_params(key, 1)] == [np.float32(w) for w in (1 / 3, 2 / 3, 2)]
    assert least.plan.budgets == method.plan.budgets


def test_a_softmax_of_budgets_has_weights_of_mean_one(experiment):
    softmax = {**FED_AVG, "training__weighting": "budget_softmax"}
    given = {**softmax, "privacy__budgets": budgets(1, 3, 7), "training__softmax_temperature": 2.0}
    method = build_method(experiment(**given), "fed_avg")
    shares = np.exp([0.5, 1.5, 3.5]) / np.exp([0.5, 1.5, 3.5]).sum()
    weights = [one["weight"] for one in method.client_params(RunKey.from_test_seed(3), 1)]
    np.testing.assert_allclose(weights, 3 * shares, rtol=1e-6)
    equal = build_method(experiment("equal", **softmax, privacy__budgets=budgets(2.3)), "fed_avg")
    assert [one["weight"] for one in equal.client_params(RunKey.from_test_seed(3), 1)] == [1.0] * 3
    # The temperature is a part of the training; elsewhere it is not, so that older runs keep their digests.
    warmer = experiment("warmer", **{**given, "training__softmax_temperature": 4.0})
    assert build_method(warmer, "fed_avg").config_hash != method.config_hash
    plain = {**FED_AVG, "privacy__budgets": budgets(1, 3, 7)}
    cool, warm = (
        experiment(name, **plain, training__softmax_temperature=one) for name, one in (("c", 1.0), ("w", 9.0))
    )
    assert build_method(cool, "fed_avg").config_hash == build_method(warm, "fed_avg").config_hash


def test_budgets_too_far_apart_for_a_softmax_are_refused(experiment):
    given = {**FED_AVG, "training__weighting": "budget_softmax", "training__softmax_temperature": 0.1}
    with pytest.raises(ConfigError, match=r"from 1 to 10 are too far apart .* to at least 1$"):
        build_method(experiment(**given, privacy__budgets=budgets(1, 10)), "fed_avg")


def test_the_mean_is_weighted_by_budgets(experiment):
    """Against the silos' own models after the same steps, which local training keeps."""
    given = {**FED_AVG, "privacy__budgets": budgets(2, 4, 10), "training__rounds": 1, "training__weighting": "budget"}
    state = train(experiment(**given), "fed_avg", progress=False)
    alone = {**given, "algorithms": {"local_only": {}}, "export__algorithm": "local_only"}
    silos = train(experiment("alone", **alone), "local_only", progress=False)
    trained = np.array([one["weights"]["dense_0/kernel"] for one in silos.client_states], np.float64)
    expected = np.average(trained, axis=0, weights=[2, 4, 10])
    found = state.server_state["algorithm"]["weights"]["dense_0/kernel"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(trained).max())
    assert np.abs(expected - trained.mean(axis=0)).max() > 1e-3 * np.abs(trained).max()


@pytest.mark.parametrize("weighting", ["budget", "budget_softmax"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"privacy__kind": "none"}, "needs privacy.budgets, and privacy.kind none has none"),
        (
            {"privacy__budgets": budgets(1, math.inf)},
            "needs finite budgets, and that of 1 silos, for example 'silo_01', is inf",
        ),
    ],
)
def test_weights_by_budgets_need_finite_budgets(experiment, overrides, message, weighting):
    with pytest.raises(ConfigError, match=f"'{weighting}' {message}"):
        build_method(experiment(**FED_AVG, **overrides, training__weighting=weighting), "fed_avg")


@pytest.mark.parametrize("weighting", ["budget", "budget_softmax"])
def test_rows_of_silos_have_no_weights(experiment, weighting):
    given = {"algorithms": {"pfa": {}}, "export__algorithm": "pfa", "privacy__budgets": budgets(1, 2, 6)}
    with pytest.raises(
        ConfigError, match=rf"'{weighting}' has no effect on algorithms\.pfa, whose server receives each silo's"
    ):
        build_method(experiment(**given, training__weighting=weighting), "pfa")


def test_reports_have_labels_beside_true_epsilons(experiment, capsys):
    given = {
        **FED_AVG,
        "training__rounds": 2,
        "training__test_only_seed": None,
        "privacy__budgets": budgets(1, 3, 3, level="minimum"),
        "privacy__noise_calibration": "paper_asymptotic",
    }
    config = experiment(**given)
    state, method = train(config, "fed_avg", progress=False), build_method(config, "fed_avg")
    assert f"fed_avg: warning: {method.plan.warning}" in capsys.readouterr().err
    summary = evaluate_experiment(config)
    assert [silo["noise_label"] for silo in summary["silos"]] == [1, 3, 3]
    for silo, (client_id, budget) in zip(summary["silos"], method.plan.budgets.items(), strict=True):
        assert silo["epsilon_target"] == budget.epsilon
        assert silo["epsilon_spent"] == state.ledger.epsilon(client_id).best <= budget.epsilon
    page = (Path(config.output) / "report.html").read_text()
    assert "ε label" in page and "is truly" in page
    assert "The ε that the formula was asked for, between 1 and 3, is a label and no guarantee." in page
    assert "The noise of every silo is that of the smallest label" in page
