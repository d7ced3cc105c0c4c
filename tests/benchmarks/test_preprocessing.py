"""The benchmark of preparing: the script it compares with does the same work, and what it records adds up."""

import json
import sys

import pyarrow.parquet
import pytest

from beam_pipelines.contact_graph.degree import EdgeLevel
from beam_pipelines.contact_graph.job import run_contact_graph_job
from beam_pipelines.contact_graph.rows import ContactGraphOptions, RowSettings
from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak
from beam_pipelines.epidemic.population import PopulationOptions, generate_population
from benchmarks.machine import measure_command
from benchmarks.preparing import polars_rows
from benchmarks.preparing.femnist import write_leaf_files
from benchmarks.preparing.run import plot_costs
from tests.data.written_clients import as_stored
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.example_codec import decode_examples


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    folder = tmp_path_factory.mktemp("town")
    generate_population(folder, PopulationOptions(num_people=800, num_regions=3))
    simulate_outbreak(folder, OutbreakOptions(reproduction_number=4.0))
    return folder


def stored_rows(dataset):
    """Every row of a client dataset, as bytes and label, sorted."""
    rows = []
    for shard in dataset.manifest.shards:
        content = (dataset.path / shard.name).read_bytes()
        x, y = decode_examples(dataset.manifest.features, content, shard.name)
        stored = as_stored(dataset.manifest.features, x)
        rows += [(values.tobytes(), int(label)) for values, label in zip(stored, y, strict=True)]
    return sorted(rows)


def test_the_script_makes_the_very_rows_of_the_job(town, tmp_path, monkeypatch):
    options = ContactGraphOptions(
        town, tmp_path / "job", rows=RowSettings(degree_bound=EdgeLevel()), min_people_per_silo=1
    )
    run_contact_graph_job(options)
    monkeypatch.setattr(sys, "argv", ["polars_rows", str(town), str(tmp_path / "rows.parquet")])
    polars_rows.main()
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    script = sorted(zip(table["x"].to_pylist(), table["y"].to_pylist(), strict=True))
    job = stored_rows(ClientDataset.open(tmp_path / "job"))
    assert len(job) == 1600 and sum(label for _, label in job) > 0
    assert script == job


def test_costs_of_all_processes_are_counted():
    # Half a second of work and 200 MB in a child of the command.
    child = (
        "import time\nx = bytearray(200 << 20)\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True); print('done')"
    cost = measure_command([sys.executable, "-c", parent])
    assert cost.output == "done\n"
    assert cost.cpu_s >= 0.5 and cost.wall_s >= 0.5 and cost.peak_rss_mb > 200


def test_failing_command_says_so():
    with pytest.raises(RuntimeError, match="exit 3"):
        measure_command([sys.executable, "-c", "raise SystemExit(3)"])


def test_leaf_files_have_the_writers_and_images_asked_for(tmp_path):
    write_leaf_files(tmp_path, num_writers=3, num_images=10)
    leaf = json.loads((tmp_path / "all_data_0.json").read_text())
    assert leaf["num_samples"] == [4, 3, 3] and sorted(leaf["user_data"]) == sorted(leaf["users"])
    image = leaf["user_data"][leaf["users"][0]]["x"][0]
    assert len(image) == 784 and image.count(1.0) > 392 and min(image) < 0.1


def test_figure_leaves_out_what_has_no_contacts(tmp_path):
    row = {"engine": "files", "cpu_s": 1.0, "wall_s": 1.0, "peak_rss_mb": 100}
    plot_costs([{**row, "edges": 10}, {**row, "edges": 100}, {**row, "edges": 0}], tmp_path / "costs.png")
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
