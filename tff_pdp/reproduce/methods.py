"""Lists the methods that are rows of results, by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class SweptMethod:
    """A row of the results.

    Attributes:
      title: title for readers.
      algorithm: name of a method in the configuration.
      settings: settings that replace the method's.
      overrides: values that replace those of the configuration, the scale and the variant, by dotted key.
      warm_start_rounds: number of rounds that the method makes beyond those of the configuration.
    """

    title: str
    algorithm: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warm_start_rounds: int = 0


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
# Methods that treat silos by their budgets; they differ only where budgets do.
_BUDGET_METHODS = {
    "minimum": SweptMethod("Minimum", "fed_avg", overrides={"privacy.budgets.level": "minimum"}),
    "wei_avg": SweptMethod("WeiAvg", "fed_avg", overrides={"training.weighting": "budget"}),
    # The first round divides the silos into strict and liberal ones; it leaves the model as it is.
    "pfa": SweptMethod("PFA", "pfa", warm_start_rounds=1),
    "pfa_plus": SweptMethod("PFA+", "pfa", {"plus": True}, warm_start_rounds=1),
    "public_only": SweptMethod("Liberal silos only", "public_only", warm_start_rounds=1),
}
# Methods for experiments with synthetic data, on which every method of a configuration is trained first.
_SYNTHETIC_METHODS = {
    "local_synthetic": SweptMethod("Local, own synthetic data", "local_only"),
    "fed_prox": SweptMethod("FedProx", "fed_prox"),
    "fed_nova": SweptMethod("FedNova", "fed_nova"),
    "scaffold": SweptMethod("SCAFFOLD", "scaffold"),
    "fed_meta": SweptMethod("FedMeta", "fed_meta"),
    "fed_meta_second": SweptMethod("FedMeta, second order", "fed_meta_second"),
    "pppfl": SweptMethod("PPPFL", "pppfl", overrides={"training.weighting": "budget_softmax"}),
    # Five rounds of two epochs adapt to the records, in place of five epochs each.
    "fed_avg_short": SweptMethod("FedAvg, adapted for fewer epochs", "fed_avg", {"adaptation_steps": "2 epochs"}),
    "pppfl_short": SweptMethod(
        "PPPFL, adapted for fewer epochs",
        "pppfl",
        {"adaptation_steps": "2 epochs"},
        {"training.weighting": "budget_softmax"},
    ),
}
# In the same experiments, methods without synthetic data: the whole budget pays for DP-SGD on the records.
_WITHOUT_SYNTHETIC = {"privacy.synthetic": None}
_RECORDS_METHODS = {
    # A configuration has the learning rate and the epochs of each point. All epochs are in one round, as nothing leaves
    # a silo.
    **{
        f"local_{point}": SweptMethod(
            f"Local on records, {words}", f"local_{point}", overrides={**_WITHOUT_SYNTHETIC, "training.rounds": 1}
        )
        for point, words in {
            "slow_short": "lower rate, fewer epochs",
            "slow_long": "lower rate, more epochs",
            "fast_short": "higher rate, fewer epochs",
            "fast_long": "higher rate, more epochs",
        }.items()
    },
    # As many epochs in all as local training with more epochs: 13 rounds train the shared model, and 12 tune it in each
    # silo.
    "finetune_records": SweptMethod(
        "FedAvg, then tuning, on records", "finetune", overrides={**_WITHOUT_SYNTHETIC, "training.rounds": 25}
    ),
}
METHODS = {**_SILO_METHODS, **_USER_METHODS, **_BUDGET_METHODS, **_SYNTHETIC_METHODS, **_RECORDS_METHODS}
SILO_METHODS = tuple(_SILO_METHODS)
# Methods in which nothing leaves a client. If clients are users, their results do not depend on epsilon.
RELEASE_NOTHING = ("local_only",)
# Methods whose figures are drawn against lambda.
GRID_METHODS = ("mr_mtl", "ditto")
# Methods that show the cost of selecting clusters and of using the data twice.
OVERHEAD_METHODS = ("local_only", "fed_avg", "mr_mtl", "ditto", "ifca_fed_avg", "ifca")
