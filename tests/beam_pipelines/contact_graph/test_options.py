"""Options that mean nothing are refused by their names, before anything is read."""

import gzip

import pytest

from beam_pipelines.contact_graph.degree import parse_degree_bound
from beam_pipelines.contact_graph.job import ContactGraphOptions
from tests.beam_pipelines.contact_graph.graph_support import job_of, options_of, small_town
from tff_pdp.errors import DataError

PROMISE = {"kind": "promise", "max_degree": 2}
GROUPS = {"kind": "public_groups", "group_column": "person.school", "max_group_size": 3}


@pytest.mark.parametrize("value", [-1, 2.5, 2.0, True, "2", None])
@pytest.mark.parametrize(("bound", "key"), [(PROMISE, "max_degree"), (GROUPS, "max_group_size")])
def test_bounds_that_are_no_integers(bound, key, value):
    with pytest.raises(DataError, match=f"degree_bound: {key} is {value!r}; it must be an integer, at least"):
        parse_degree_bound({**bound, key: value})


@pytest.mark.parametrize("column", ["school", "person.", "person.a.b", "target.infected", "residence_grid.1", 3, None])
def test_groups_that_are_no_columns(column):
    with pytest.raises(DataError, match=r"degree_bound: group_column is .*; it must be person.<column> or household"):
        parse_degree_bound({**GROUPS, "group_column": column})


@pytest.mark.parametrize("kind", [["edge"], {}, 1, None, "node"])
def test_kinds_that_are_not_known(kind):
    with pytest.raises(DataError, match=r"degree_bound: kind is .*; known: promise, public_groups, edge"):
        parse_degree_bound({"kind": kind})


def test_a_bound_that_is_no_mapping():
    with pytest.raises(DataError, match="degree_bound is 'edge'; it must be a mapping"):
        parse_degree_bound("edge")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [-1, 2.5, 3.0, True, "3"])
@pytest.mark.parametrize(
    "key",
    ["num_slots", "num_days", "window_days", "prediction_days", "num_windows", "min_people_per_silo", "num_shards"],
)
def test_numbers_that_are_no_integers(key, value):
    with pytest.raises(DataError, match=f"^{key} must be an integer, at least"):
        options(**{key: value})


@pytest.mark.parametrize("silo_by", ["residence_grid.0", "residence_grid.0.00", "residence_grid.-1", "region", 3, []])
def test_silos_that_cannot_be_made(silo_by):
    with pytest.raises(DataError, match=r"^silo_by"):
        options(silo_by=silo_by)
    assert options(silo_by="residence_grid.0.5").silo_by == "residence_grid.0.5"


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
    return ContactGraphOptions(**{"input": "in", "output": "out", "degree_bound": {"kind": "edge"}, **changes})
