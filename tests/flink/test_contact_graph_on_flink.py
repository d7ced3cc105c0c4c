"""The contact-graph job on a real cluster: the same bytes as in memory, broadcast of people included."""

from beam_pipelines.contact_graph.degree import EdgeLevel
from beam_pipelines.contact_graph.job import run_contact_graph_job
from beam_pipelines.contact_graph.rows import ContactGraphOptions, RowSettings
from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak
from beam_pipelines.epidemic.population import PopulationOptions, generate_population
from beam_pipelines.epidemic.table_writer import TableFormat
from tests.beam_pipelines.dataset.test_femnist import contents


def test_same_bytes_as_in_memory(cluster, tmp_path):
    # Tables in several files, so that there are several tasks.
    table_format = TableFormat("parquet", rows_per_file=2_000)
    generate_population(tmp_path / "town", PopulationOptions(num_people=600, num_regions=3), table_format)
    simulate_outbreak(tmp_path / "town", OutbreakOptions(reproduction_number=3.0), table_format=table_format)

    def run(name, **engine):
        options = ContactGraphOptions(
            tmp_path / "town", tmp_path / name, rows=RowSettings(degree_bound=EdgeLevel()), num_shards=4, **engine
        )
        return run_contact_graph_job(options)

    expected = run("in_memory")
    before = cluster.job_ids()
    made = run("on_flink", exchange="runner", runner=cluster.runner, pipeline_args=cluster.flags)
    assert contents(made.output) == contents(expected.output)
    assert made.manifest.kept.examples == 1_200 and len(made.manifest.clients) == 3

    (job,) = cluster.job_ids() - before
    reads = [
        counts
        for name, counts in cluster.records_read(job).items()
        if "MapPartition at" in name and "read_contacts" in name and "read_contacts/tasks" not in name
    ]
    assert any(len(counts) == 2 and min(counts.values()) > 0 for counts in reads), cluster.records_read(job)
