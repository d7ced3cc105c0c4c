"""Apache Beam jobs that turn raw federated data into client datasets.

keyed_hash: uniform numbers from a seed and ids
records: records that travel between steps; reasons why a record is left out
engine: runs the stages of a job on Beam
rules: which users and examples are usable, and how examples are split
options: descriptions of raw data, options of a job, summary of a job
dataset: writes the client dataset of any job
tables: CSV and Parquet files of examples, and their schema
sources: readers of each kind of raw data
contact_graph: makes rows of features from the people of a contact graph
epidemic: generated populations, simulated outbreaks
commands: the jobs as commands
__main__: `python -m beam_pipelines`
"""

import logging


def _is_not_spam(record: logging.LogRecord) -> bool:
    # Beam warns at import that its optional client for Google's BigQuery is not installed. Nothing else is dropped.
    return not str(record.msg).startswith("apitools not found")


logging.getLogger().addFilter(_is_not_spam)
