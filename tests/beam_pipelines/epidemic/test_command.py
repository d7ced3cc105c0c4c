"""The three commands, from the words a user types to the tables and the summary."""

import pytest

from beam_pipelines.__main__ import JOBS
from beam_pipelines.contact_graph.input_tables import read_table
from beam_pipelines.contact_graph.tables import read_observed_days
from beam_pipelines.epidemic.outbreak import OutbreakOptions
from beam_pipelines.epidemic.population import PopulationOptions
from tests.unrun import parse
from tff_pdp.errors import ConfigError


def test_generate_and_simulate(tmp_path):
    folder = str(tmp_path / "town")
    text = run(["generate-population", "--output", folder, "--num_people", "300", "--format", "csv.gz"])
    assert text.startswith("300 people in ") and text.endswith(f"population: {folder}")
    text = run(["simulate-outbreak", "--input", folder, "--rows_per_file", "5000", "--observed_days", "50"])
    assert "% of 300 people infected in 57 days" in text and text.endswith(f"outbreak: {folder}")
    states = list(read_table(tmp_path / "town", "disease_outcome_training", ["state"]))
    assert sum(len(rows["state"]) for rows in states) == 300 * 50
    assert len(list((tmp_path / "town" / "disease_outcome_training").iterdir())) == 3


def test_import(tmp_path):
    (tmp_path / "tij.dat").write_text("20 1 2\n")
    folder = str(tmp_path / "out")
    words = ["import-contacts", "--contacts", str(tmp_path / "tij.dat"), "--output", folder, "--activity", "school"]
    with pytest.raises(ConfigError, match="required: --observed_days"):
        run(words)
    text = run([*words, "--observed_days", "3"])
    assert read_observed_days(tmp_path / "out") == 3
    assert text.startswith("2 people (0 met nobody") and text.endswith(f"population: {folder}")
    (rows,) = read_table(tmp_path / "out", "population_network", ["activity1", "duration"])
    assert {name: values.tolist() for name, values in rows.items()} == {"activity1": [5], "duration": [20]}


def test_errors_reach_the_caller():
    with pytest.raises(ConfigError, match="num_people 1: 4 regions need"):
        run(["generate-population", "--output", "unused", "--num_people", "1"])
    with pytest.raises(ConfigError, match="--num_regions must be a whole number of at least 1, not '0'"):
        run(["generate-population", "--output", "unused", "--num_people", "9", "--num_regions", "0"])


def test_options_are_those_of_the_settings():
    generate = ["generate-population", "--output", "x", "--num_people", "50"]
    assert parse(JOBS, generate).population == PopulationOptions(num_people=50)
    assert parse(JOBS, [*generate, "--no_assignments"]).population == PopulationOptions(
        num_people=50, assignments=False
    )
    assert parse(JOBS, ["simulate-outbreak", "--input", "x"]).outbreak == OutbreakOptions()
    with pytest.raises(ConfigError, match="not allowed with argument"):
        run(["simulate-outbreak", "--input", "x", "--transmission_rate", "1", "--reproduction_number", "1"])
    with pytest.raises(ConfigError, match="unknown option --direct_num_workers"):
        run([*generate, "--direct_num_workers=2"])


def run(words):
    return parse(JOBS, words).run().text
