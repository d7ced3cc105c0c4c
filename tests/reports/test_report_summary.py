import dataclasses
import math

import pytest

from tests.reports import report_samples as samples
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
    assert summary.worst_decile(values) == pytest.approx(expected)


def test_nothing_to_summarise_is_nan():
    assert math.isnan(summary.worst_decile([]))
    assert math.isnan(summary.spread([math.nan]).minimum)


def test_spread_by_hand():
    result = summary.spread([0.2, 0.4, 0.6, 0.8])
    assert result.standard_deviation == pytest.approx(math.sqrt(0.05))
    assert (result.minimum, result.maximum) == (0.2, 0.8)


def test_gain_is_paired_silo_by_silo():
    silos = samples.sample_silos(3)
    personal = [0.5, 0.7, 0.9]
    alone = [0.4, 0.8, None]
    silos = tuple(
        dataclasses.replace(silo, accuracy={"mr_mtl": mine} | ({} if theirs is None else {"local_only": theirs}))
        for silo, mine, theirs in zip(silos, personal, alone, strict=True)
    )
    rows = {row.algorithm.name: row for row in summary.comparison_rows(samples.sample_algorithms(silos), silos)}
    assert rows["mr_mtl"].gain == pytest.approx(0.0)  # +0.1 and -0.1; the third silo has nothing to compare with.
    assert (rows["mr_mtl"].silos_better, rows["mr_mtl"].silos_compared) == (1, 2)
    assert rows["local_only"].gain is None


def test_featured_method_is_the_exported_one_else_the_best_on_validation():
    algorithms = samples.sample_algorithms(samples.sample_silos(3))
    assert getattr(summary.featured_algorithm(algorithms), "name", None) == "mr_mtl"
    tempting = dataclasses.replace(algorithms[1], mean_accuracy=1.0)
    kept_here = [dataclasses.replace(algorithm, exported=False) for algorithm in (tempting, algorithms[2])]
    assert getattr(summary.featured_algorithm(kept_here), "name", None) == "mr_mtl"
    assert summary.featured_algorithm([]) is None
