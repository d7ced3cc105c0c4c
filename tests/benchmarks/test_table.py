"""Tables of hand-made rows."""

import json

import pytest

from benchmarks.rounds.table import BEGIN, END, main, render, replace_between_markers


def row(contender, seconds, **more):
    return {
        "workload": "W2",
        "contender": contender,
        "s_per_round": seconds,
        "s_per_round_min": seconds / 2,
        "cpu_s_per_round": 2 * seconds,
        "peak_rss_mb": 600.4,
        "first_round_s": 12.345,
        "repetitions": 9,
        "clients_per_round": 20,
        "population": 200,
        "data": "synthetic",
        "versions": {"fake": "1.2"},
        "machine": "an abacus",
        "load_before": 0.3,
        **more,
    }


def test_ratios_are_shares_of_the_references_time_and_the_fastest_comes_first():
    text = render([row("stock-tff", 0.4), row("pfl", 0.2), row("floor-tf", 0.05)])
    assert text.splitlines()[:8] == [
        "Machine: an abacus. Load before a workload (1-minute average): 0.3 to 0.3.",
        "",
        "### W2: 20 of 200 clients, synthetic data, median of 9 rounds",
        "",
        "| contender | s/round | fastest s/round | CPU s/round | peak MB | first round s "
        "| time / stock-tff | time / floor-tf |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| floor-tf | 0.05 | 0.025 | 0.1 | 600 | 12.3 | 0.12 | 1.00 |",
        "| pfl | 0.2 | 0.1 | 0.4 | 600 | 12.3 | 0.50 | 4.00 |",
    ]
    assert "- pfl: fake 1.2" in text


def test_without_a_reference_its_ratio_is_empty():
    text = render([row("pfl", 0.2), row("fedjax", 0.1, data="School", workload="W3", population=139)])
    assert "| pfl | 0.2 | 0.1 | 0.4 | 600 | 12.3 |  |  |" in text
    assert "### W3: 20 of 139 clients, School data" in text


def test_rows_of_a_gpu_say_so_and_when_they_were_measured():
    text = render([row("floor-tf", 0.1, device="gpu", machine="an abacus; a card used", date="2026-11-22")])
    assert text.splitlines()[0].endswith(
        "a card used. Load before a workload (1-minute average): 0.3 to 0.3. Measured on 2026-11-22."
    )
    assert "### W2 on a GPU: 20 of 200 clients" in text


def test_only_what_is_between_the_markers_changes():
    assert replace_between_markers(f"a\n{BEGIN}\nold\n{END}\nz\n", "new") == f"a\n{BEGIN}\n\nnew\n{END}\nz\n"
    for broken in (f"{END}{BEGIN}", BEGIN, f"{BEGIN}{END}{END}", "nothing"):
        with pytest.raises(ValueError, match="needs one"):
            replace_between_markers(broken, "new")


def test_writing_into_a_document(tmp_path):
    rows, scaling, document = tmp_path / "rows.json", tmp_path / "scaling.json", tmp_path / "performance.md"
    rows.write_text(json.dumps([row("pfl", 0.2)]))
    scaling.write_text(json.dumps([row("pfl", 5.0, clients_per_round=500), row("pfl", 1.0, clients_per_round=100)]))
    document.write_text(f"# Performance\n{BEGIN}\n{END}\n")
    arguments = ["--rows", str(rows), "--scaling", str(scaling), "--document", str(document)]
    main(arguments)
    first = document.read_text()
    assert "| W2 | pfl | 100 | 200 | 1 | 2 | 600 |\n| W2 | pfl | 500 | 200 | 5 | 10 | 600 |\n" in first
    main(arguments)
    assert document.read_text() == first
