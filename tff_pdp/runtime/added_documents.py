"""What a version says of its privacy and its making once clients are added to it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tff_pdp.personal_models.new_clients.costs import RecordedCost
from tff_pdp.reports.content import json_safe

_SILOS_ADDED = (
    "rows of silos that were added after training are made by DP-SGD on, or a private selection by, the silo's own "
    "examples alone; their epsilon is that of everything on record of the silo"
)
_NOT_PROTECTED = (
    "rows of clients that were added after training are made of the client's own examples without noise: whoever sees "
    "such a row can learn about its own client from it, and about nobody else more than before"
)


def report_with(before: Mapping[str, Any], costs: Mapping[str, RecordedCost]) -> dict[str, Any]:
    """The report with the new silos' costs in it, beside the others'; of other clients, what protects them."""
    if not costs:
        return {**before, "clients_added_after_training": _NOT_PROTECTED}
    new = [
        {
            "id": client_id,
            "epsilon": cost.epsilon,
            "delta": cost.delta,
            "releases_on_record": cost.releases,
            "added_after_training": True,
            **({"epsilon_reason": cost.why_infinite} if cost.why_infinite else {}),
        }
        for client_id, cost in costs.items()
    ]
    others = [silo for silo in before.get("silos", []) if silo["id"] not in costs]
    return json_safe({**before, "silos": [*others, *new], "clients_added_after_training": _SILOS_ADDED})


def card_with(before: Mapping[str, Any], version: Path, fitted: Collection[str], *, num_clients: int) -> dict[str, Any]:
    """The model card of the version that is made from another.

    Args:
      before: the card of that one.
      version: its folder.
      fitted: ids of the clients that were fitted.
      num_clients: how many clients there are now.
    """
    num_new = num_clients - before["clients"]
    return {
        **before,
        "clients": num_clients,
        "clients_not_in_training": before.get("clients_not_in_training", 0) + num_new,
        "clients_fitted_after_training": before.get("clients_fitted_after_training", 0) + len(fitted),
        "made_from_version": int(version.name),
    }
