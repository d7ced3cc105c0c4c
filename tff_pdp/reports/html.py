"""Writes the report as one HTML file without external resources."""

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

from tff_pdp.files import replace_text
from tff_pdp.privacy.facts import GUARANTEES
from tff_pdp.reports import content, plots, summary
from tff_pdp.reports import words as numbers
from tff_pdp.reports.summary import metric_text

_TEMPLATE = "report.html.jinja"
# A page with more rows is no longer read.
_MOST_USERS = 100


def write_report(report: content.Report, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes the report's page atomically, creates missing folders, and returns the page's path."""
    target = pathlib.Path(path)
    page = render_report(report)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, page)
    return target


def render_report(report: content.Report) -> str:
    """Returns the report's page as HTML text.

    All silos are listed. If there are more than a hundred users, only the hundred with the worst results of the
    featured method are listed.
    """
    # Autoescape is named outright: jinja2's guess from the file name does not know ".jinja".
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = metric_text(report.metric)
    environment.filters.update(
        plain=numbers.plain, upper=numbers.upper, spent=numbers.spent, value=text.value, gain=text.gain
    )
    return environment.get_template(_TEMPLATE).render(_page(report))


def _page(report: content.Report) -> dict[str, Any]:
    """Returns all that the template prints."""
    rows = summary.comparison_rows(report.algorithms, report.clients, report.metric, report.baseline)
    featured = summary.featured_algorithm(report.algorithms, report.metric, report.baseline)
    return {
        "report": report,
        "words": report.words,
        "metric": metric_text(report.metric),
        "rows": rows,
        "featured": next((row for row in rows if row.algorithm is featured), None),
        "listed": _listed(report, featured),
        "privacy": report.privacy,
        "facts": report.privacy.facts,
        "guarantees": GUARANTEES,
        "config": list(_flat(report.config)),
        "figures": _figures(report, featured),
    }


def _listed(report: content.Report, featured: content.AlgorithmResult | None) -> Sequence[content.ClientScores]:
    """Returns the clients in the table of results."""
    if featured is None or not report.are_users or len(report.clients) <= _MOST_USERS:
        return report.clients
    return summary.worst_clients(report.clients, featured.facts.name, report.metric, _MOST_USERS)


def _figures(report: content.Report, featured: content.AlgorithmResult | None) -> list[dict[str, Any]]:
    """Returns the figures that have data, each with a caption that says whether its numbers are private."""
    label, words = metric_text(report.metric).label, report.words
    drawn = [
        (
            plots.history_figure(report.algorithms, report.metric, words),
            f"Validation {label} per round, mean over {words.many}.",
            "Not private: computed on held-out validation examples without noise.",
        ),
        (
            plots.epsilon_figure(getattr(report.privacy.facts, "silos", ())),
            "ε spent by each silo for one method, against its target.",
            "Public: follows from public settings, costs nothing to show."
            + ("" if report.privacy.private else " This run is not private; silos without a guarantee are left out."),
        ),
        (
            plots.synthetic_figure(report.synthetic),
            "Synthetic images that silos made once and released, a row for each silo, in the order of their labels.",
            "Released by silos; their cost is in each silo's ε."
            if report.privacy.private
            else "Not private: no guarantee holds for this run.",
        ),
    ]
    if featured is not None:
        by_client = (
            plots.metric_figure(report.clients, featured, report.metric, report.baseline, words),
            f"Test {label} of each {words.one} under {featured.facts.title}.",
            "Not private: computed on held-out test examples without noise.",
        )
        drawn.insert(1, by_client)
    return [
        # The SVG is ours, and every text in it was escaped when it was drawn.
        {"svg": markupsafe.Markup(svg), "caption": caption, "privacy": privacy}
        for svg, caption, privacy in drawn
        if svg
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, text) pairs."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
