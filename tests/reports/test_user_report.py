"""The page and the summary of an experiment whose clients are users, of a few and of very many."""

import dataclasses
import html.parser
import json
import math
import re

import pytest

from tests.reports import report_samples
from tests.reports import user_samples as samples
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
from tff_pdp.reports import content, plots, summary
from tff_pdp.reports import summary as summary_json
from tff_pdp.reports.html import render_report
from tff_pdp.reports.words import USERS


def text_of(page):
    """The text of a page without its figures."""
    found = []
    parser = html.parser.HTMLParser()
    parser.handle_data = found.append
    parser.feed(re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))
    return " ".join(" ".join(found).split())


def test_a_page_of_users_speaks_of_users():
    page = render_report(samples.sample_user_report(12))
    text = text_of(page)
    assert "silo" not in page.lower()
    assert "12 users · 3 methods" in text
    assert "ε of every user 1.99 one method, at δ = 0.0001" in text
    assert "mean over users" in text and "Worst tenth of users" in text
    assert "Accuracy of each user" in text and "user-003" in text
    assert "MR-MTL 2 1.99 2.2 1.99 0.0001 1.5 10,000 3" in text
    assert "MR-MTL: the noise is too much." in text
    # One epsilon needs no figure; a method that releases nothing spends none.
    assert page.count("<svg") == 2
    assert "formal-conditional ε ≤ 0 The number" in text
    assert "User not private Test records not private" in text


def test_a_test_seed_is_not_private():
    page = render_report(samples.sample_user_report(3, methods=samples.seeded_methods()))
    assert "<strong>Not private.</strong> test mode" in page and "Private training" not in page


def test_of_many_users_the_worst_are_listed():
    report = samples.sample_user_report(539)
    text = text_of(render_report(report))
    assert "Accuracy of the worst-off users" in text
    assert "The 100 of 539 users that MR-MTL serves worst, the worst one first." in text
    ordered = sorted(report.clients, key=lambda user: user.personal["mr_mtl"])
    listed = re.findall(r"\buser-\d+", text.split("serves worst")[1])
    assert listed == [user.id for user in ordered[:100]]


def test_a_hundred_thousand_users_make_a_small_page_and_summary():
    few = samples.sample_users(1000)
    many = tuple(dataclasses.replace(few[place % 1000], id=f"u{place}") for place in range(100_000))
    report = dataclasses.replace(samples.sample_user_report(3), clients=many)
    assert len(render_report(report)) < 300_000
    found = summary_json.summary_content(report)
    assert (found["num_users"], found["users"]) == (100_000, None)
    assert len(json.dumps(found)) < 10_000
    # Each of a thousand values a hundred times: the same median as of the thousand.
    median = sorted(user.personal["mr_mtl"] for user in few)[499:501]
    assert median[0] <= found["quantiles"]["mr_mtl"]["personal"]["50"] <= median[1]


def test_curves_keep_their_ends(monkeypatch):
    monkeypatch.setattr(plots, "_MOST_POINTS", 3)
    figure = plots._curves([("personal model", [0.5, 0.1, 0.4, 0.2, 0.3])], ACCURACY, USERS)
    (line,) = figure.axes[0].lines
    assert list(line.get_ydata()) == [0.1, 0.3, 0.5]
    assert list(line.get_xdata()) == pytest.approx([10, 50, 90])


def test_the_summary_says_what_each_method_cost_and_how_each_user_fares():
    report = samples.sample_user_report(3)
    found = summary_json.summary_content(report)
    json.dumps(found, allow_nan=False)
    row = found["algorithms"]["mr_mtl"]
    assert (row["epsilon_spent"], row["delta"], row["noise_to_signal"]) == (1.9876, 1e-4, 3.0)
    assert found["algorithms"]["local_only"]["epsilon_spent"] == 0.0
    assert [user["id"] for user in found["users"]] == [user.id for user in report.clients]
    assert "silos" not in found
    assert found["privacy"]["users"]["epsilon_spent"] == 1.9876
    assert found["notes"] == ["MR-MTL: the noise is too much."]
    assert found["quantiles"]["local_only"]["shared"] is None


def test_what_a_seeded_run_spent_is_null_in_the_summary():
    found = summary_json.summary_content(report_samples.seeded_report(3))
    json.dumps(found, allow_nan=False)
    assert (found["privacy"]["claim"], found["privacy"]["private"]) == ("none", False)
    assert {silo["epsilon_spent"] for silo in found["silos"]} == {None}
    assert {silo["epsilon_target"] for silo in found["silos"]} == {1.0, 2.0, 4.0}
    found = summary_json.summary_content(samples.sample_user_report(3, methods=samples.seeded_methods()))
    assert (found["privacy"]["users"]["epsilon_spent"], found["privacy"]["users"]["epsilon_target"]) == (None, 2.0)


def test_quantiles_by_hand():
    users = [content.ClientScores(str(place), 1, {"a": place / 100}, {"a": None}) for place in range(101)]
    users.append(content.ClientScores("none", 0, {"a": math.nan}, {"a": None}))
    found = summary_json._quantiles(users, "a")
    assert found["shared"] is None
    expected = {"0": 0.0, "1": 0.01, "5": 0.05, "10": 0.1, "25": 0.25, "50": 0.5, "99": 0.99, "100": 1.0}
    assert {share: found["personal"][share] for share in expected} == pytest.approx(expected)


def test_a_summary_says_who_can_read_budgets():
    silos = summary_json.summary_content(report_samples.sample_report(3))
    users = summary_json.summary_content(samples.sample_user_report(3))
    assert silos["privacy"]["budget_exposure"] == "inferable"
    rows = {name: row["budget_exposure"] for name, row in silos["algorithms"].items()}
    assert rows == {"local_only": "none", "fed_avg": "inferable", "mr_mtl": "inferable"}
    assert users["privacy"]["budget_exposure"] == "public"


def test_a_summary_of_silos_has_no_keys_of_users():
    found = summary_json.summary_content(report_samples.sample_report(3))
    assert set(found) == {"title", "metric", "higher_is_better", "algorithms", "notes", "advice", "silos", "privacy"}
    assert "noise_to_signal" not in found["algorithms"]["mr_mtl"]


@pytest.mark.parametrize(("metric", "expected"), [(ACCURACY, ["b", "a"]), (MEAN_SQUARED_ERROR, ["c", "a"])])
def test_the_worst_off_come_first_and_those_without_results_last(metric, expected):
    values = {"a": 0.5, "none": math.nan, "b": 0.1, "c": 0.9}
    users = [content.ClientScores(name, 1, {"m": value}, {}) for name, value in values.items()]
    assert [user.id for user in summary.worst_clients(users, "m", metric, 2)] == expected
    assert summary.worst_clients(users, "m", metric, 4)[-1].id == "none"
