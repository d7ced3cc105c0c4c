"""Advice follows from results: each case, with numbers worked out by hand, and its counterpart without advice."""

import dataclasses

import pytest

from tests.reports.report_samples import sample_report, seeded_report
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
from tff_pdp.reports.advice import advice_on, advice_on_search
from tff_pdp.reports.html import render_report
from tff_pdp.reports.summary import summary_content


def with_results(report, personal, shared=None):
    """The report with these test results by method, a value for each client; and those of shared models."""
    clients = [
        dataclasses.replace(
            client,
            personal={name: values[place] for name, values in personal.items()},
            shared={name: (shared or {}).get(name, [None] * len(report.clients))[place] for name in personal},
        )
        for place, client in enumerate(report.clients)
    ]
    return dataclasses.replace(report, clients=tuple(clients))


def with_history(report, name, values):
    """The report with this learning curve of a method, and without those of the others."""
    algorithms = [
        dataclasses.replace(
            one, history=tuple((5 * place, value) for place, value in enumerate(values, 1) if one.facts.name == name)
        )
        for one in report.algorithms
    ]
    return dataclasses.replace(report, algorithms=tuple(algorithms))


@pytest.fixture
def report():
    config = {"algorithms": {"local_only": {}, "fed_avg": {}, "mr_mtl": {"prox_weight": 1.0}}}
    return with_history(dataclasses.replace(sample_report(4), config=config), "nobody", [])


BETTER, WORSE, BETWEEN = [0.8, 0.82, 0.78, 0.8], [0.6, 0.65, 0.6, 0.55], [0.7, 0.72, 0.7, 0.68]


def test_a_method_that_loses_to_learning_alone(report):
    own = with_results(report, {"local_only": BETTER, "fed_avg": WORSE, "mr_mtl": WORSE})
    fed_avg, mr_mtl = advice_on(own)
    # 0.8 - 0.6, in the mean over four silos; the largest epsilon of the sample is 4 * 0.985 = 3.94, at 1e-5.
    assert mr_mtl == (
        "MR-MTL: in the mean 20.0 points worse than learning alone (not private); try a smaller prox_weight than 1, "
        "prox_weight: auto, or local_only. A further run costs up to 3.94 of epsilon more, 7.88 in all at delta 2e-05."
    )
    assert fed_avg.startswith("FedAvg: in the mean 20.0 points worse than learning alone (not private); try a method")


def test_a_method_that_loses_to_a_shared_model(report):
    results = {"local_only": WORSE, "fed_avg": BETTER, "mr_mtl": BETWEEN}
    (advice,) = advice_on(with_results(report, results))
    assert advice.startswith(
        "MR-MTL: in the mean 10.0 points worse than FedAvg (not private); try a larger prox_weight than 1, or fed_avg."
    )
    # Its own shared model is named first, and once is enough.
    (advice,) = advice_on(with_results(report, results, {"mr_mtl": BETTER}))
    assert "worse than its own shared model (not private)" in advice


def test_differences_within_two_standard_errors_are_no_reason(report):
    noisy = [0.9, 0.5, 0.9, 0.5]
    assert advice_on(with_results(report, {"local_only": BETWEEN, "fed_avg": noisy, "mr_mtl": noisy})) == []
    best = {"local_only": WORSE, "fed_avg": BETWEEN, "mr_mtl": BETTER}
    assert advice_on(with_results(report, best)) == []
    # One silo has no spread.
    one = dataclasses.replace(report, clients=report.clients[:1])
    assert advice_on(with_results(one, {"local_only": [0.9], "fed_avg": [0.1], "mr_mtl": [0.1]})) == []


def test_of_errors_the_smaller_one_is_better():
    report = with_history(sample_report(4, metric=MEAN_SQUARED_ERROR), "nobody", [])
    errors = {"local_only": [0.1, 0.12, 0.1, 0.1], "fed_avg": [0.2, 0.22, 0.2, 0.22], "mr_mtl": [0.1, 0.11, 0.1, 0.1]}
    (advice,) = advice_on(with_results(report, errors))
    assert advice.startswith("FedAvg: in the mean 0.105 mean squared error worse than learning alone")


def test_a_curve_that_was_best_long_before_the_end(report):
    same = {name: BETTER for name in ("local_only", "fed_avg", "mr_mtl")}
    rising, falling = [0.5, 0.6, 0.7, 0.71, 0.7, 0.71, 0.72, 0.71], [0.6, 0.61, 0.7, 0.71, 0.6, 0.61, 0.5, 0.51]
    assert advice_on(with_history(with_results(report, same), "mr_mtl", rising)) == []
    (advice,) = advice_on(with_history(with_results(report, same), "mr_mtl", falling))
    assert advice.startswith(
        "MR-MTL: the validation accuracy was best before round 20 of 100 (not private); more rounds mean more noise in "
        "each, so try training.rounds: 20. A further run costs"
    )
    # Seven validations are too few for quarters of two.
    assert advice_on(with_history(with_results(report, same), "mr_mtl", falling[:7])) == []


def test_without_a_guarantee_no_epsilon_is_named():
    report = with_history(seeded_report(4), "nobody", [])
    found = advice_on(with_results(report, {"local_only": BETTER, "fed_avg": WORSE, "mr_mtl": WORSE}))
    assert len(found) == 2 and all(
        one.endswith("costs no epsilon here, as this one has no guarantee.") for one in found
    )


def test_a_search_that_ends_at_an_end_of_its_values():
    def selected(*values):
        return {str(place): {"hparams": {"prox_weight": value}} for place, value in enumerate(values)}

    values = {"prox_weight": [0.1, 1.0, 10.0]}
    (largest,) = advice_on_search(selected(10.0, 10.0, 0.1), values)
    assert largest == (
        "prox_weight: 2 of 3 silos selected 10, the largest value tried; the best may be larger: search again with "
        "values beyond it, which costs each silo the budget of a search once more"
    )
    (smallest,) = advice_on_search(selected(0.1, 0.1, 0.1, 1.0), values)
    assert "4 silos selected 0.1, the smallest value tried; the best may be smaller" in smallest
    assert advice_on_search(selected(1.0, 1.0, 10.0), values) == []
    # Half of them are not most of them, and one value has no ends.
    assert advice_on_search(selected(10.0, 1.0), values) == []
    assert advice_on_search(selected(1.0, 1.0), {"prox_weight": [1.0]}) == []


def test_the_page_and_the_summary_have_the_advice(report):
    told = dataclasses.replace(report, advice=("MR-MTL: try <less>.",))
    assert "<h2>Advice</h2>" in render_report(told) and "MR-MTL: try &lt;less&gt;." in render_report(told)
    assert summary_content(told)["advice"] == ["MR-MTL: try <less>."]
    assert "<h2>Advice</h2>" not in render_report(report)
    assert summary_content(report)["metric"] == ACCURACY.name
