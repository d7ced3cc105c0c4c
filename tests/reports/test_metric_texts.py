import dataclasses
import math

import pytest

from tests.reports import report_samples as samples
from tff_pdp.models.metrics import ACCURACY, AVERAGE_PRECISION, MEAN_SQUARED_ERROR
from tff_pdp.reports import content
from tff_pdp.reports.html import render_report
from tff_pdp.reports.summary import left_out_notes, metric_text, pooled_notes
from tff_pdp.reports.words import SILOS, USERS


def clients(*values, num_test=10):
    return [content.ClientScores(str(place), num_test, {"a": value}, {"a": None}) for place, value in enumerate(values)]


def test_who_has_no_figure_is_counted_with_the_reason():
    found = [*clients(0.5, math.nan, math.nan), *clients(math.nan, num_test=0)]
    assert left_out_notes(AVERAGE_PRECISION, found, SILOS) == [
        "Left out of all figures of test average precision: of 4 silos, 1 without test examples and 2 without positive "
        "test examples."
    ]
    assert left_out_notes(MEAN_SQUARED_ERROR, found[:2], USERS) == [
        "Left out of all figures of test mean squared error: of 2 users, 1 without finite results."
    ]
    assert left_out_notes(ACCURACY, clients(0.5, 0.0), SILOS) == []


def test_pooled_figures_are_named_by_method():
    (note,) = pooled_notes(
        AVERAGE_PRECISION, {"Local only": {"pooled_average_precision": 0.25}, "MR-MTL": {"pooled": 0.5}}, USERS
    )
    assert note == (
        "Average precision of all users' test examples ranked together, each scored by the personal model of its user: "
        "Local only 25.0 %, MR-MTL 50.0 %. Not private."
    )
    assert pooled_notes(ACCURACY, {"MR-MTL": {}}, USERS) == []


@pytest.mark.parametrize("metric", [ACCURACY, AVERAGE_PRECISION, MEAN_SQUARED_ERROR])
def test_every_metric_has_a_text(metric):
    assert metric_text(metric).label.replace(" ", "_") == metric.name


@pytest.mark.parametrize("count", [3, 60])
def test_a_page_with_clients_that_have_no_average_precision(count):
    """Every third silo has none, of no method."""
    report = samples.sample_report(count, metric=AVERAGE_PRECISION)
    silos = tuple(
        dataclasses.replace(
            silo,
            personal={name: math.nan if place % 3 == 0 else value for name, value in silo.personal.items()},
            shared={name: value and (math.nan if place % 3 == 0 else value) for name, value in silo.shared.items()},
        )
        for place, silo in enumerate(report.clients)
    )
    report = dataclasses.replace(report, clients=silos, algorithms=samples.sample_algorithms(silos, AVERAGE_PRECISION))
    page = render_report(report)
    assert "nan" not in page.lower()
    assert "accurac" not in page.split("Privacy statement")[0].lower()
    assert f"over {2 * count // 3} silos under MR-MTL" in page
    assert f"of {2 * count // 3} silos better" in page
