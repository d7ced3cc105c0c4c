"""Options that mean nothing are refused by their names, before anything is read."""

import gzip
import re
from pathlib import Path

import pytest

from beam_pipelines.contact_graph.degree import DegreeBound
from tests.beam_pipelines.contact_graph.graph_support import job_of, options_of, small_town
from tff_pdp.errors import ConfigError
from tff_pdp.settings import read_settings

PROMISE = {"kind": "promise", "max_degree": 2}
GROUPS = {"kind": "public_groups", "group_column": "person.school", "max_group_size": 3}


@pytest.mark.parametrize("value", [-1, 2.5, 2.0, True, "2", None])
@pytest.mark.parametrize(("bound", "key"), [(PROMISE, "max_degree"), (GROUPS, "max_group_size")])
def test_bounds_that_are_no_integers(bound, key, value):
    least = {"max_degree": 0, "max_group_size": 1}[key]
    message = f"degree_bound.{key} must be a whole number of at least {least}, not {re.escape(repr(value))}$"
    with pytest.raises(ConfigError, match=message):
        read_bound({**bound, key: value})


@pytest.mark.parametrize("column", ["school", "person.", "person.a.b", "target.infected", "residence_grid.1", 3, None])
def test_groups_that_are_no_columns(column):
    with pytest.raises(ConfigError, match=r"degree_bound\.group_column must be text like .*person\|household.*, not "):
        read_bound({**GROUPS, "group_column": column})


@pytest.mark.parametrize("kind", [["edge"], {}, 1, None, "node"])
def test_kinds_that_are_not_known(kind):
    with pytest.raises(ConfigError, match=r"degree_bound\.kind must be one of promise, public_groups, edge, not "):
        read_bound({"kind": kind})


def test_a_kind_must_be_said():
    with pytest.raises(ConfigError, match=r"missing key degree_bound\.kind: one of promise, public_groups, edge$"):
        read_bound({"max_degree": 2})


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({**PROMISE, "max_group_size": 3}, r"unknown key degree_bound\.max_group_size; known: adjacency, max_degree"),
        ({"kind": "promise"}, r"missing key degree_bound\.max_degree: a whole number of at least 0"),
        ({"kind": "edge", "max_degree": 3}, r"unknown key degree_bound\.max_degree; known: none"),
        (
            {**PROMISE, "adjacency": "add_or_remove_one"},
            r"degree_bound\.adjacency must be one of replace_one, replace_special, not 'add_or_remove_one'",
        ),
    ],
)
def test_keys_that_a_kind_does_not_have(bound, message):
    with pytest.raises(ConfigError, match=message):
        read_bound(bound)


def test_a_bound_that_is_no_mapping():
    with pytest.raises(ConfigError, match=r"degree_bound must be a mapping whose kind is one of .*, not 'edge'"):
        read_bound("edge")


@pytest.mark.parametrize("value", [-1, 2.5, 3.0, True, "3"])
@pytest.mark.parametrize(
    "key",
    ["num_slots", "num_days", "window_days", "prediction_days", "num_windows", "min_people_per_silo", "num_shards"],
)
def test_numbers_that_are_no_integers(key, value):
    with pytest.raises(ConfigError, match=rf"{key} must be a whole number of at least \d+( and .*)?, not "):
        options(**{key: value})


@pytest.mark.parametrize("silo_by", ["residence_grid.0", "residence_grid.0.00", "residence_grid.-1", "region", 3, []])
def test_silos_that_cannot_be_made(silo_by):
    with pytest.raises(ConfigError, match="silo_by"):
        options(silo_by=silo_by)
    assert options(silo_by="residence_grid.0.5").rows.silo_by == "residence_grid.0.5"


@pytest.mark.parametrize(("suffix", "contact_bytes"), [("csv", 34), ("csv.gz", 9)])
def test_shards_by_the_size_of_the_contacts(tmp_path, monkeypatch, suffix, contact_bytes):
    source = small_town().write(tmp_path / "input")
    path = source / f"population_network.{suffix}"
    content = (source / "population_network.csv").read_bytes()
    (source / "population_network.csv").unlink()
    path.write_bytes(gzip.compress(content, mtime=0) if suffix == "csv.gz" else content)
    monkeypatch.setattr("beam_pipelines.contact_graph.job._SHARD_CONTACTS", 10)
    job = job_of(options_of(source, tmp_path, num_shards=0))
    assert job.num_shards == 1 + path.stat().st_size // contact_bytes // 10 > 1


def options(**changes):
    return options_of("in", Path("out"), **changes)


def read_bound(content):
    return read_settings(DegreeBound, content, "experiment.yaml", "degree_bound")
