"""What `summary.json` holds: the headline figures of every method, what they cost, and how each client fares."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tff_pdp.reports import content, summary

# Of more users, quantiles say enough, and a file of all of them would name every one.
MOST_USERS = 5000
_QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
# What it repeats of the report's privacy statement.
_PRIVACY_KEYS = ("unit", "adjacency", "claim", "claim_reason", "private", "composed")
_ELSEWHERE = ("name", "history", "title", "user_costs")


def summary_content(report: content.Report) -> dict[str, Any]:
    """Returns plain data for `json.dumps`.

    Of silos, `silos` has one row each. Of users, every method's row says what it cost, `num_users` is their number,
    `users` has one row each, or is None where there are more than 5000, and `quantiles` has, for every method and each
    of its models, quantiles of the test metric over users, by their share in percent. `notes` are those of the report.
    """
    start = {
        "title": report.title,
        "metric": report.metric.name,
        "higher_is_better": report.metric.higher_is_better,
        "algorithms": {algorithm.name: _algorithm_row(algorithm) for algorithm in report.algorithms},
        "notes": list(report.notes),
    }
    if not report.users:
        privacy = {key: report.privacy[key] for key in _PRIVACY_KEYS}
        return {**start, "silos": [silo.to_dict() for silo in report.silos], "privacy": privacy}
    return {
        **start,
        "num_users": len(report.users),
        "users": [user.to_dict() for user in report.users] if len(report.users) <= MOST_USERS else None,
        "quantiles": {algorithm.name: _quantiles(report.users, algorithm.name) for algorithm in report.algorithms},
        "privacy": {key: report.privacy[key] for key in (*_PRIVACY_KEYS, "users")},
    }


def _algorithm_row(algorithm: content.AlgorithmResult) -> dict[str, Any]:
    row = algorithm.to_dict()
    return {**{key: value for key, value in row.items() if key not in _ELSEWHERE}, **(row["user_costs"] or {})}


def _quantiles(users: Sequence[content.ClientScores], algorithm: str) -> dict[str, dict[str, float] | None]:
    return {
        "personal": _quantiles_of(summary.personal_values(users, algorithm)),
        "shared": _quantiles_of(summary.shared_values(users, algorithm)),
    }


def _quantiles_of(values: Sequence[float]) -> dict[str, float] | None:
    """None where no user has a value."""
    present = np.array([value for value in values if not np.isnan(value)])
    if not len(present):
        return None
    return {f"{100 * share:g}": float(np.quantile(present, share)) for share in _QUANTILES}
