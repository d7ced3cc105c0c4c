"""Apache Beam jobs that turn raw federated data into client datasets."""

import logging


def _is_not_spam(record: logging.LogRecord) -> bool:
    # Beam warns at import that its optional client for Google's BigQuery is not installed. Nothing else is dropped.
    return not str(record.msg).startswith("apitools not found")


logging.getLogger().addFilter(_is_not_spam)
