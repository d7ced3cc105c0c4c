"""Runs the contact-graph job once, on the named engine, and prints the number of rows that the job wrote.

python -m benchmarks.preparing.contact_graph_run INPUT OUTPUT ENGINE
"""

import argparse
import json
from pathlib import Path

from beam_pipelines.contact_graph.degree import EdgeLevel
from beam_pipelines.contact_graph.job import run_contact_graph_job
from beam_pipelines.contact_graph.rows import ContactGraphOptions, RowSettings

_TWO_WORKERS = "--direct_num_workers=2"
ENGINES = {
    "files": ("files", ()),
    "files, 2 threads": ("files", (_TWO_WORKERS, "--direct_running_mode=multi_threading")),
    "files, 2 processes": ("files", (_TWO_WORKERS, "--direct_running_mode=multi_processing")),
    "one pipeline": ("runner", ()),
    "one pipeline, 2 processes": ("runner", (_TWO_WORKERS, "--direct_running_mode=multi_processing")),
}


def main() -> None:
    """Runs the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("engine", choices=ENGINES)
    options = parser.parse_args()
    exchange, pipeline_args = ENGINES[options.engine]
    summary = run_contact_graph_job(
        ContactGraphOptions(
            options.input,
            options.output,
            rows=RowSettings(degree_bound=EdgeLevel()),
            min_people_per_silo=1,
            exchange=exchange,
            pipeline_args=pipeline_args,
        )
    )
    print(json.dumps({"output_rows": sum(summary.manifest.num_examples.values())}))


if __name__ == "__main__":
    main()
