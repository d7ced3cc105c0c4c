"""`tff-pdp data describe`: of tables before they are prepared, and of a client dataset."""

import json
import subprocess
import sys

import pytest

from tests.beam_pipelines.tables.people import ROWS, table, write_people
from tff_pdp.cli import main

BAD = table(*ROWS, "tall,run,1,sit", "1,run")


@pytest.fixture
def people(tmp_path):
    return write_people(tmp_path / "people", ann=BAD, bob=table(*ROWS, ROWS[0]), cid=table(ROWS[0]))


def described(capsys, *words):
    assert main(["data", "describe", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables_are_described_as_they_are(people, capsys):
    content = described(capsys, "--input", people, "--label-column", "activity", "--min-examples-per-client", 2)
    assert (content["clients"], content["examples"], content["rows_read"]) == (2, 9, 12)
    assert content["examples_of_a_client"] == {"smallest": 4, "largest": 5}
    # Rows 1 and 3 of each person sit; Bob and Cid have one more of the first.
    assert content["classes"] == {"sit": 6, "walk": 4}
    assert content["left_out_clients"] == {"cid": 1}
    assert content["columns"]["height"] == {
        "kind": "number",
        "allowed": "a number",
        "smallest": -3.0,
        "largest": 20.0,
    }
    assert content["columns"]["sport"]["values"] == {"run": 9, "swim": 2}
    assert content["dead_letters"] == {
        "value_of_wrong_type": {
            "records": 1,
            "first": "ann.csv, client 'ann': line 6, column 'height': 'tall'; allowed: a number",
        },
        "row_of_another_length": {
            "records": 1,
            "first": "ann.csv, client 'ann': line 7: 2 values; allowed: 4 values, as in the header",
        },
    }
    assert "classes of 'activity' (2)" in content["treated_as_public"]


def test_the_text_names_clients_that_lack_a_class(tmp_path, capsys):
    folder = write_people(tmp_path / "people", ann=table(*ROWS), bob=table(ROWS[0], ROWS[2]))
    words = ["--input", str(folder), "--label-column", "activity", "--min-examples-per-client", "1"]
    assert main(["data", "describe", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "clients   2, with 2 to 4 examples each" in lines
    assert "absent    1 clients lack classes: bob (walk)" in lines
    assert "  height: number, a number, seen -3 to 20" in lines


def test_an_experiment_has_its_schema_and_the_client_dataset_says_the_same(people, tmp_path, capsys):
    config = {
        "title": "t",
        "output": str(tmp_path / "run"),
        "data": {
            "kind": "table",
            "input": str(people),
            "label_column": "activity",
            "schema": {"activity": {"kind": "class", "classes": ["walk", "sit"]}},
            "min_examples_per_client": 2,
            "max_bad_fraction": 1.0,
        },
        "model": {"kind": "linear"},
        "privacy": {"kind": "none", "unit": "silo", "batch_size": 2},
        "training": {"rounds": 1},
        "algorithms": {"fed_avg": {}},
        "export": {"algorithm": "fed_avg", "model_name": "m"},
    }
    path = tmp_path / "my.yaml"
    path.write_text(json.dumps(config))
    before = described(capsys, "--config", path)
    assert list(before["classes"]) == ["walk", "sit"]
    assert not any("classes of" in one for one in before["treated_as_public"])
    assert main(["prepare", "--config", str(path)]) == 0
    capsys.readouterr()
    after = described(capsys, "--input", tmp_path / "run" / "clients")
    assert (after["clients"], after["examples"]) == (before["clients"], before["examples"])
    assert after["left_out_clients"] == {"client_below_min_examples": ["cid"]}
    assert after["treated_as_public"] == before["treated_as_public"]
    # Those of Cid, who is left out, are no longer counted.
    assert sum(after["classes"].values()) == 9


def test_one_table_needs_a_column_of_clients(people, capsys):
    assert main(["data", "describe", "--input", str(people / "ann.csv")]) == 2
    assert "--client-column" in capsys.readouterr().err


def test_it_starts_without_tensorflow(people):
    code = (
        "import sys; from tff_pdp.cli import main; "
        f"main(['data', 'describe', '--input', {str(people)!r}, '--label-column', 'activity']); "
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'scipy', 'dp_accounting', 'apache_beam')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
