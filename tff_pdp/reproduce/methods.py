"""The methods that reproductions compare, as rows of their results."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class SweptMethod:
    """A row of the results: a method of the configuration, perhaps with other settings of its own."""

    title: str
    algorithm: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_LOCAL = {"local_only": SweptMethod("Local", "local_only")}
_SILO_METHODS = {
    **_LOCAL,
    "fed_avg": SweptMethod("FedAvg", "fed_avg"),
    "finetune": SweptMethod("Fine-tuning", "finetune"),
    "mr_mtl": SweptMethod("MR-MTL", "mr_mtl"),
    "mr_mtl_auto": SweptMethod("MR-MTL, automatic λ", "mr_mtl", {"prox_weight": "auto"}),
    "ditto": SweptMethod("Ditto", "ditto"),
    "mocha": SweptMethod("Mocha", "mocha"),
    "ifca": SweptMethod("IFCA, every round", "ifca"),
    "ifca_fed_avg": SweptMethod("IFCA, first rounds", "ifca_fed_avg"),
    "ifca_mr_mtl": SweptMethod("IFCA, then MR-MTL", "ifca_mr_mtl"),
    "ifca_local": SweptMethod("IFCA, then local", "ifca_local"),
    "ifca_finetune": SweptMethod("IFCA, then fine-tuning", "ifca_finetune"),
}
_USER_METHODS = {
    **_LOCAL,
    "dp_fed_avg_ft": SweptMethod("DP-FedAvg, tuned heads", "dp_fed_avg_ft"),
    "pp_sgd": SweptMethod("PP-SGD", "pp_sgd"),
    "pmtl_ft": SweptMethod("PMTL, tuned heads", "pmtl_ft"),
    "centaur": SweptMethod("CENTAUR", "centaur"),
    "dp_pfed_dsu": SweptMethod("DP-pFedDSU", "dp_pfed_dsu"),
    "udp_hypernet": SweptMethod("UDP-Alg", "udp_hypernet"),
    "udp_hypernet_ft": SweptMethod(
        "UDP-Alg, fine-tuned", "udp_hypernet", {"fine_tune": True, "adapt_steps": "5 epochs"}
    ),
}
METHODS = {**_SILO_METHODS, **_USER_METHODS}
# By whose privacy is protected.
SILO_METHODS = tuple(_SILO_METHODS)
USER_METHODS = tuple(_USER_METHODS)
# Nothing leaves a client: where users are protected from what the server releases, no epsilon matters.
RELEASE_NOTHING = ("local_only",)
# Whose figures are drawn against lambda.
GRID_METHODS = ("mr_mtl", "ditto")
# What selecting clusters and touching the data twice costs is seen in these.
OVERHEAD_METHODS = ("local_only", "fed_avg", "mr_mtl", "ditto", "ifca_fed_avg", "ifca")
