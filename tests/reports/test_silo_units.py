"""Statements about rows of a contact graph say person or pair where others say record."""

import pytest

from tests.reports import report_samples as samples
from tests.reports.statement_cases import ALONE, EDGE, NODE
from tff_pdp.reports import html as report_html

SENTENCES = {
    NODE: [
        "Each silo's people are protected by (ε, δ)-differential privacy",
        "Unit: one person of one silo's contact graph (node).",
        "if one person takes other values, its disease states included, and other contacts, and all other people",
        "At most S = 41 records of a silo then differ (nobody has more than 20 contacts).",
        "what someone's disease did to others is not hidden",
        "nothing adds up over silos",
        "It counts all S = 41 records that may differ",
        "which people belong to which silo, and S are treated as public",
        "it protects what each person puts into training records, its own and its contacts'.",
        "private in that silo's people",
    ],
    EDGE: [
        "Each silo's contacts are protected by (ε, δ)-differential privacy",
        "(edge). Two data sets are neighbours if these contacts are there or are not",
        "At most S = 2 records of a silo then differ (a pair's contacts are in the two people's rows).",
        "People's own features and disease states are NOT protected.",
        "All contacts of one person together, and whether it had any, are protected less",
        "private in that silo's contacts",
    ],
}


@pytest.mark.parametrize("influence", [NODE, EDGE])
def test_key_sentences(influence):
    statement = samples.sample_statement(samples.sample_silos(3), row_influence=influence)
    text = samples.text_of(statement)
    assert [sentence for sentence in SENTENCES[influence] if sentence not in text] == []
    for words in (
        "one example of one silo",
        "single record",
        "one training record",
        "A person with records in several",
    ):
        assert words not in text
    assert statement.facts.unit == influence.unit
    assert len({paragraph.heading for paragraph in statement.paragraphs}) == len(statement.paragraphs)


def test_what_else_a_person_may_be_replaced_by_is_said():
    statement = samples.sample_statement(samples.sample_silos(3), row_influence=ALONE)
    text = samples.paragraph(statement, "Unit of protection")
    assert "or is as if it were not, its records all zeros" in text
    assert "At most S = 1 record of a silo then differ" in text


def test_records_are_records():
    statement = samples.sample_statement(samples.sample_silos(3))
    assert statement.facts.unit == "silo example"
    text = samples.text_of(statement)
    assert "node" not in text and "contact" not in text


def test_the_page_names_the_unit_and_whose_protection_it_lists():
    page = report_html.render_report(samples.sample_report(3, row_influence=NODE))
    assert "unit: node)" in page and "Protection of the people" in page
    page = report_html.render_report(samples.sample_report(3))
    assert "unit: silo example)" in page and "Protection of the training records" in page
