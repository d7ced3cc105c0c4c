"""Apache Beam jobs that turn raw federated data into client datasets.

keyed_hash: uniform numbers from a seed and ids
records: records that travel between steps; reasons why a record is left out
engine: how stages run
rules: which users and examples are usable, and how examples are split
options: raw data, options of a job, summary of a job
dataset: how any job writes a client dataset
sources: kinds of raw data
contact_graph: people of a contact graph as rows
epidemic: generated populations, simulated outbreaks
commands: the jobs as commands
__main__: `python -m beam_pipelines`
"""

import logging


def _is_not_spam(record: logging.LogRecord) -> bool:
    # Beam warns at import that its optional client for Google's BigQuery is not installed. Nothing else is dropped.
    return not str(record.msg).startswith("apitools not found")


logging.getLogger().addFilter(_is_not_spam)
