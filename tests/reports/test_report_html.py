import dataclasses
import html.parser
import math
import re

import pytest
from msgspec.structs import replace

from tests.reports import report_samples as samples
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
from tff_pdp.reports import html as report_html
from tff_pdp.reports import plots, summary

_VOID = {"meta", "br", "link", "img", "hr", "input"}


class _BalanceChecker(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def _parse(page: str) -> _BalanceChecker:
    checker = _BalanceChecker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("count", [1, 12, 40, 41, 200])
def test_page_is_balanced_self_contained_and_complete(count):
    report = samples.sample_report(count)
    page = report_html.render_report(report)
    checker = _parse(page)
    assert not re.search(r"https?://|src=|url\((?!#)|@import", page)
    assert not checker.seen & {"script", "link", "img", "iframe"}
    text = set(checker.text)
    assert [silo.id for silo in report.clients if silo.id not in text] == []
    assert page.count("<svg") == 3


@pytest.mark.parametrize("count", [3, 41])
def test_a_regression_is_reported_in_its_own_metric(count):
    report = samples.sample_report(count, metric=MEAN_SQUARED_ERROR)
    page = report_html.render_report(report)
    text = " ".join(_parse(page).text)
    assert "accurac" not in text.lower()
    assert page.count("validation mean squared error,") == 1
    assert page.count("test mean squared error (lower is better)") == 2
    best = report.algorithms[2]
    assert f"<b>{best.mean:.3g}</b>" in page
    assert f"{best.mean_over_examples:.3g} over examples" in page
    # About 0.006 less than alone: a gain, and in the metric's own unit.
    assert re.search(r"<b>\+0\.00\d+</b><span>mean squared error; \d+ of \d+ silos better", page)
    assert " %" not in text.split("Privacy statement")[0]


@pytest.mark.parametrize(("metric", "worst"), [(ACCURACY, 0), (MEAN_SQUARED_ERROR, -1)])
def test_the_worst_silo_is_drawn_first(metric, worst, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "_named_figure", lambda names: drawn.update(names=names) or plots._figure(2.0))
    silos = samples.sample_clients(5, metric=metric)
    plots.metric_figure(silos, samples.sample_algorithms(silos, metric)[2], metric)
    by_value = sorted(silos, key=lambda silo: silo.personal["mr_mtl"])
    assert drawn["names"][0] == by_value[worst].id
    assert summary.worst_first([0.2, 0.1, math.nan, 0.3], metric) == (
        [0.1, 0.2, 0.3] if worst == 0 else [0.3, 0.2, 0.1]
    )


def test_hostile_silo_names_are_shown_as_text():
    name = "<script>alert('$x^2$ & \"y\"')"
    page = report_html.render_report(samples.sample_report(3, first_id=name))
    checker = _parse(page)
    assert "script" not in checker.seen
    assert name in checker.text


def test_silo_names_in_any_script_are_drawn():
    assert "病院" in plots.epsilon_figure(samples.sample_silos(2, first_id="病院"))


def test_test_seed_is_shown_as_not_private():
    page = report_html.render_report(samples.seeded_report(3))
    assert "<strong>Not private.</strong> test mode" in page
    assert "Private training" not in page
    assert "no ε holds" in page and "targets and δ were asked for, and are no guarantee" in page
    # Three bounds of each silo.
    assert page.count('<td class="number">none</td>') == 9


def test_missing_numbers_are_dashes_not_errors():
    report = samples.sample_report(2)
    first, second = report.clients
    first = dataclasses.replace(first, personal={}, shared={}, num_test=0)
    costs, other = samples.sample_silos(2)
    privacy = samples.sample_statement((replace(costs, epsilon_pld=math.nan), other))
    algorithms = tuple(dataclasses.replace(algorithm, history=()) for algorithm in report.algorithms)
    page = report_html.render_report(
        dataclasses.replace(report, clients=(first, second), algorithms=algorithms, privacy=privacy)
    )
    _parse(page)
    assert "nan" not in page.lower()
    assert page.count("<svg") == 2


def test_figures_are_repeatable_and_do_not_share_identifiers():
    report = samples.sample_report(5)
    page = report_html.render_report(report)
    assert page == report_html.render_report(report)
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))


def test_a_thousand_silos_stay_small():
    assert len(plots.epsilon_figure(samples.sample_silos(1000))) < 400_000


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    target = tmp_path / "new" / "report.html"
    assert report_html.write_report(samples.sample_report(1), target) == target
    before = target.read_text(encoding="utf-8")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(report_html.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report_html.write_report(samples.sample_report(2), target)
    assert target.read_text(encoding="utf-8") == before
    assert list(target.parent.iterdir()) == [target]
