"""Contact graphs as raw data: tables that are there, tables that are made first, and what is refused."""

import dataclasses
import gzip

import numpy as np
import pytest

from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak
from beam_pipelines.epidemic.population import PopulationOptions, generate_population
from beam_pipelines.epidemic.sources import promised_influence
from tff_pdp.errors import ConfigError, DataError

PEOPLE, DEGREE = 120, 4
BOUND = {"kind": "promise", "max_degree": DEGREE}
ROWS = {"degree_bound": BOUND, "num_slots": 3, "layout": "exposure", "num_windows": 2}
POPULATION = {"num_people": PEOPLE, "num_regions": 2, "max_contacts": DEGREE}
OUTBREAK = {"initial_infections": 12, "reproduction_number": 4.0}
DATA = {"input_shape": [10], "num_classes": 2, "validation_fraction": 0.25, "num_shards": 2, "seed": 3}
TABLES = {**DATA, "kind": "contact_graph", "rows": ROWS}
SIMULATED = {
    **DATA,
    "kind": "simulated_outbreak",
    "input": "generated",
    "population": POPULATION,
    "outbreak": OUTBREAK,
    "rows": ROWS,
}
EDGES = {"degree_bound": {"kind": "edge"}, "num_slots": 2, "layout": "exposure"}
MEASURED = {
    **DATA,
    "kind": "simulated_outbreak",
    "min_examples_per_client": 1,
    "population": {"observed_days": 1},
    "outbreak": {"initial_infections": 2},
    "rows": EDGES,
}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def test_tables_that_are_there(prepare, tmp_path):
    write_tables(tmp_path / "raw", seed=5)
    dataset = prepare(**TABLES)
    assert dataset.manifest.clients.keys() == {"region-00", "region-01"}
    for counts in dataset.manifest.clients.values():
        assert counts["test"] == PEOPLE // 2
        assert counts["train"] + counts["validation"] == 2 * PEOPLE // 2
    # Two windows for the person, those met before and those met after.
    assert dataset.manifest.row_influence.num_rows == 2 * (2 * DEGREE + 1)
    assert any(dataset.load(client_id, "train").x.any() for client_id in dataset.client_ids)


def test_a_made_up_population_is_that_of_the_seed(prepare, tmp_path):
    made_up = examples(prepare(**SIMULATED))
    write_tables(tmp_path / "raw", seed=DATA["seed"])
    assert equal(made_up, examples(prepare(**TABLES)))
    assert not equal(made_up, examples(prepare(**{**SIMULATED, "seed": 4})))


def test_seeds_of_population_and_outbreak_can_be_given(prepare, tmp_path):
    seeded = {"population": {**POPULATION, "seed": 5}, "outbreak": {**OUTBREAK, "seed": 5}}
    made_up = examples(prepare(**{**SIMULATED, **seeded}))
    write_tables(tmp_path / "raw", seed=5)
    assert equal(made_up, examples(prepare(**TABLES)))


def test_measured_contacts(prepare, tmp_path):
    """As one file, as a folder, and as one of several folders."""
    folder = tmp_path / "raw" / "ward"
    write_contacts(folder / "tij_ward.dat.gz", [(20 * step, *pair) for step in (1, 2, 3) for pair in ((1, 2), (3, 4))])
    alone = prepare(**MEASURED, input=str(folder / "tij_ward.dat.gz"))
    assert alone.manifest.clients.keys() == {"unknown"}
    (folder / "metadata_ward.dat").write_text("1\tnurse\n2\tnurse\n3\tpatient\n4\tpatient\n5\tpatient\n")
    dataset = prepare(**MEASURED, input=str(folder))
    assert {name: counts["test"] for name, counts in dataset.manifest.clients.items()} == {"nurse": 2, "patient": 3}
    assert dataset.manifest.row_influence.unit == "edge" and dataset.manifest.row_influence.num_rows == 2
    of_folder = examples(dataset)
    of_network = prepare(**MEASURED, network="ward")
    assert equal(of_folder, examples(of_network))
    (tmp_path / "roles.dat").write_text("".join(f"{pid}\tsomebody\n" for pid in range(1, 6)))
    elsewhere = prepare(**MEASURED, metadata=str(tmp_path / "roles.dat"), input=str(folder))
    assert elsewhere.manifest.clients.keys() == {"somebody"}


def test_how_many_days_were_observed_must_be_said(prepare, tmp_path):
    write_contacts(tmp_path / "raw" / "tij_two.dat.gz", [(20, 1, 2), (86420, 1, 2)])
    with pytest.raises(ConfigError, match=r"experiment\.yaml: data: missing key population\.observed_days"):
        prepare(**{**MEASURED, "population": {}})
    with pytest.raises(DataError, match=r"tij_two\.dat\.gz: people met on more days than observed_days, 1"):
        prepare(**MEASURED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": {"people": 3}}, r"data: unknown key population\.people; did you mean num_people\?"),
        ({"population": {}}, r"data: missing key population\.num_people: a whole number of at least 1"),
        ({"population": {"num_people": 5}}, "data: population: num_people 5: 4 regions need at least 2 people each"),
        ({"population": {"num_people": [5]}}, r"data\.population\.num_people must be .*, not \[5\]"),
        ({"outbreak": {"rate": 1}}, r"data: unknown key outbreak\.rate; "),
        ({"outbreak": {"observed_days": 0}}, r"data: outbreak\.observed_days must be a whole .* of at least 1, not 0"),
        ({"rows": {**ROWS, "slots": 3}}, r"unknown key data\.rows\.slots; did you mean num_slots\?"),
        ({"rows": {**ROWS, "num_days": 20}}, r"data\.rows: num_days must be at least window_days"),
        ({"rows": {**ROWS, "silo_by": "region"}}, r"data\.rows\.silo_by must be text like .*person.*, not 'region'"),
        ({"rows": {}}, r"missing key data\.rows\.degree_bound: a mapping whose kind is one of promise, public_groups"),
        ({"network": "ward"}, "network and metadata are for published contacts"),
        ({"metadata": "metadata.dat"}, "network and metadata are for published contacts"),
    ],
)
def test_options_that_are_refused(prepare, changes, message):
    with pytest.raises(ConfigError, match=rf"experiment\.yaml: .*{message}"):
        prepare(**{**SIMULATED, **changes})


@pytest.mark.parametrize("changes", [{"input_shape": [11]}, {"num_classes": 3}])
def test_features_that_are_others(prepare, changes):
    with pytest.raises(ConfigError, match=f"data.{next(iter(changes))}"):
        prepare(**{**SIMULATED, **changes})


def test_a_promise_that_does_not_hold(prepare):
    rows = {**ROWS, "degree_bound": {**BOUND, "max_degree": 1}}
    with pytest.raises(DataError, match="promised max_degree 1"):
        prepare(**{**SIMULATED, "rows": rows})


def test_folders_of_measured_contacts_that_are_refused(prepare, tmp_path):
    folder = tmp_path / "raw"
    with pytest.raises(DataError, match=r"no such folder; data\.network"):
        prepare(**MEASURED, network="ward")
    folder.mkdir()
    with pytest.raises(DataError, match="0 files tij_"):
        prepare(**MEASURED)
    write_contacts(folder / "tij_one.dat.gz", [(0, 1, 2)])
    (folder / "tij_two.dat").write_text("0 1 2\n")
    with pytest.raises(DataError, match="2 files tij_"):
        prepare(**MEASURED)


def write_tables(folder, seed):
    generate_population(folder, PopulationOptions(**POPULATION, seed=seed), overwrite=True)
    simulate_outbreak(folder, OutbreakOptions(**OUTBREAK, seed=seed), overwrite=True)


def write_contacts(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines("\t".join(map(str, row)) + "\n" for row in rows)


def examples(dataset):
    """Features and labels of every silo and split."""
    loaded = {
        (client_id, split): dataset.load(client_id, split)
        for client_id in dataset.client_ids
        for split in ("train", "validation", "test")
    }
    return {key: (found.x, found.y) for key, found in loaded.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(first, second) for key in one for first, second in zip(one[key], other[key], strict=True)
    )


def test_a_promise_that_was_edited_is_refused(prepare):
    manifest = prepare(**SIMULATED).manifest
    assert promised_influence(manifest) == manifest.row_influence
    assert manifest.row_influence is not None and manifest.row_influence.num_rows == 2 * (2 * DEGREE + 1)
    for changed in (dataclasses.replace(manifest.row_influence, num_rows=1), None):
        with pytest.raises(DataError, match="row_influence is not the bound that"):
            promised_influence(dataclasses.replace(manifest, row_influence=changed))
