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


METHODS = {
    "local_only": SweptMethod("Local", "local_only"),
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
# Whose figures are drawn against lambda.
GRID_METHODS = ("mr_mtl", "ditto")
# What selecting clusters and touching the data twice costs is seen in these.
OVERHEAD_METHODS = ("local_only", "fed_avg", "mr_mtl", "ditto", "ifca_fed_avg", "ifca")
