"""Builds pandas frames of clients' numbers of examples, of training histories, and of test results."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SPLITS
from tff_pdp.errors import DataError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.reports.summary import MOST_USERS
from tff_pdp.training.run_folder import read_metrics

# Names of index levels.
ALGORITHM, CLIENT = "algorithm", "client"
# Keys of a line of validation metrics that have the same value in each line.
_CONSTANT = ("format_version", "split", "metric", "higher_is_better")
# Headline figures, in the order of the columns.
_FIGURES = ("mean", "mean_over_examples", "worst_decile", "spread", "shared_mean")


def clients_frame(clients: ClientDataset) -> pd.DataFrame:
    """Counts each client's examples: one row for each client, with columns `train`, `validation` and `test`."""
    index = pd.Index(clients.client_ids, name=CLIENT)
    return pd.DataFrame({split: clients.sizes(split) for split in SPLITS}, index=index)


def history_frame(config: ExperimentConfig, names: Sequence[str]) -> pd.DataFrame:
    """Reads the validation metrics of methods during training.

    Args:
      config: the experiment.
      names: names of the methods.

    Returns:
      One row for each validation, with the index levels `algorithm` and `round`, ascending. Columns are the figures of
      `metrics.jsonl`: `mean` of the metric over clients, which is exact and not private, `seconds` of the round, and
      others. `mean` is NaN where exact figures are switched off. A method that was trained with a private search has
      no rows.

    Raises:
      DataError: a file is missing or damaged.
    """
    rows = [{ALGORITHM: name, **_flat(row)} for name in names for row in read_metrics(config.algorithm_folder(name))]
    columns = list(dict.fromkeys([ALGORITHM, "round", "mean", *(key for row in rows for key in row)]))
    return pd.DataFrame(rows, columns=pd.Index(columns)).set_index([ALGORITHM, "round"])


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of metrics without nesting, and without constants; exact figures of clients may be nested."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        found |= _flat(value) if isinstance(value, Mapping) else {} if key in _CONSTANT else {key: value}
    return found


def methods_frame(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the headline test figures of a report's summary.

    Returns:
      One row for each method, in the order of the summary. The first columns are `mean` over clients,
      `mean_over_examples`, `worst_decile`, `spread` and `shared_mean`; further columns repeat the summary.
    """
    frame = pd.DataFrame(summary["algorithms"].values(), index=pd.Index(summary["algorithms"], name=ALGORITHM))
    frame = frame.astype({name: float for name in _FIGURES})
    return frame.reindex(columns=[*_FIGURES, *(name for name in frame.columns if name not in _FIGURES)])


def client_results_frame(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Returns each client's test results from a report's summary.

    Returns:
      One row for each method and client, with the index levels `algorithm` and `client`. Columns are `num_test`, the
      number of test examples; `personal`, the metric of the client's own model; and `shared`, the metric of the shared
      model. NaN stands for a client without test examples, and for a method without a shared model.

    Raises:
      DataError: the summary lists no clients, because there are more than 5000 users.
    """
    clients = summary["silos"] if "silos" in summary else summary["users"]
    if clients is None:
        raise DataError(
            f"results of single clients are not kept for more than {MOST_USERS} users: the report has quantiles"
        )
    rows = [
        {
            ALGORITHM: name,
            CLIENT: client["id"],
            "num_test": client["num_test"],
            **{kind: _number(client[kind].get(name)) for kind in ("personal", "shared")},
        }
        for name in summary["algorithms"]
        for client in clients
    ]
    return pd.DataFrame(rows).set_index([ALGORITHM, CLIENT])


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)
