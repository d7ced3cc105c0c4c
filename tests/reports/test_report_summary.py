import dataclasses
import math

import pytest
from msgspec.structs import replace

from tests.reports import report_samples as samples
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
from tff_pdp.reports import summary


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.4], 0.4),
        ([0.9, 0.2, 0.5], 0.2),
        ([0.1 * k for k in range(1, 11)], 0.1),
        ([k / 20 for k in range(20)], 0.025),  # The worst two of twenty: 0 and 0.05.
        ([k / 20 for k in range(20)] + [math.nan] * 30, 0.025),
    ],
)
def test_worst_decile_by_hand(values, expected):
    assert summary.worst_decile(values, ACCURACY) == pytest.approx(expected)


def test_of_errors_the_largest_tenth_is_the_worst():
    # The worst two of twenty: 0.95 and 0.9.
    assert summary.worst_decile([k / 20 for k in range(20)] + [math.nan], MEAN_SQUARED_ERROR) == pytest.approx(0.925)
    assert summary.worst_decile([0.02, 0.3], MEAN_SQUARED_ERROR) == 0.3


def test_a_mean_counts_silos_or_examples_and_leaves_out_who_has_none():
    values, num_examples = [0.5, math.nan, 1.0, 0.25], [10, 0, 30, 60]
    assert summary.mean_over_silos(values) == pytest.approx(1.75 / 3)
    assert summary.mean_over_examples(values, num_examples) == pytest.approx((5 + 30 + 15) / 100)


def test_nothing_to_summarise_is_nan():
    assert math.isnan(summary.worst_decile([], ACCURACY))
    assert math.isnan(summary.mean_over_silos([math.nan]))
    assert math.isnan(summary.mean_over_examples([math.nan], [0]))
    assert math.isnan(summary.spread([math.nan]))


def test_spread_by_hand():
    assert summary.spread([0.2, 0.4, 0.6, 0.8]) == pytest.approx(math.sqrt(0.05))


@pytest.mark.parametrize("metric", [ACCURACY, MEAN_SQUARED_ERROR])
def test_gain_is_paired_silo_by_silo(metric):
    silos = samples.sample_clients(3)
    personal = [0.5, 0.7, 0.9]
    alone = [0.2, 0.8, None]
    silos = tuple(
        dataclasses.replace(silo, personal={"mr_mtl": mine} | ({} if theirs is None else {"local_only": theirs}))
        for silo, mine, theirs in zip(silos, personal, alone, strict=True)
    )
    rows = summary.comparison_rows(samples.sample_algorithms(silos), silos, metric)
    rows = {row.algorithm.facts.name: row for row in rows}
    # +0.3 and -0.1; the third silo has nothing to compare with. Of errors it is the second silo that is better off.
    assert rows["mr_mtl"].gain == pytest.approx(0.1 if metric.higher_is_better else -0.1)
    assert (rows["mr_mtl"].clients_better, rows["mr_mtl"].clients_compared) == (1, 2)
    assert rows["local_only"].gain is None


def kept(algorithm):
    """The same method, not exported."""
    return dataclasses.replace(algorithm, facts=replace(algorithm.facts, exported=False))


def test_featured_method_is_the_exported_one_else_the_best_on_validation():
    algorithms = samples.sample_algorithms(samples.sample_clients(3))
    assert _featured(algorithms) == "mr_mtl"
    tempting = dataclasses.replace(algorithms[1], mean=1.0)
    kept_here = [kept(algorithm) for algorithm in (tempting, algorithms[2])]
    assert _featured(kept_here) == "mr_mtl"
    assert summary.featured_algorithm([], ACCURACY) is None


def test_the_best_on_validation_is_that_with_the_least_error_and_never_one_without_results():
    local_only, fed_avg, mr_mtl = map(kept, samples.sample_algorithms(samples.sample_clients(3)))
    fed_avg = dataclasses.replace(fed_avg, history=((1, 0.1), (2, 0.5)))
    mr_mtl = dataclasses.replace(mr_mtl, history=((1, 0.9), (2, 0.4)))
    assert _featured([local_only, fed_avg, mr_mtl], MEAN_SQUARED_ERROR) == "mr_mtl"
    assert _featured([local_only, fed_avg, mr_mtl], ACCURACY) == "fed_avg"
    for history in ((), ((2, math.nan),)):
        unknown = dataclasses.replace(mr_mtl, history=history)
        for metric in (ACCURACY, MEAN_SQUARED_ERROR):
            assert _featured([local_only, unknown, fed_avg], metric) == "fed_avg"


def _featured(algorithms, metric=ACCURACY):
    return summary.featured_algorithm(algorithms, metric).facts.name
