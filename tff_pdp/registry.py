"""Everything that has a name in a configuration: one line per entry, and the file to read for each."""

from collections.abc import Callable, Mapping
from typing import Any

from beam_pipelines.raw_data import RawData
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.ditto import build_ditto
from tff_pdp.algorithms.fed_avg import build_fed_avg
from tff_pdp.algorithms.finetune import build_finetune
from tff_pdp.algorithms.ifca import build_ifca
from tff_pdp.algorithms.ifca_fed_avg import build_ifca_fed_avg
from tff_pdp.algorithms.ifca_finetune import build_ifca_finetune
from tff_pdp.algorithms.ifca_local import build_ifca_local
from tff_pdp.algorithms.ifca_mr_mtl import build_ifca_mr_mtl
from tff_pdp.algorithms.local_only import build_local_only
from tff_pdp.algorithms.mocha import build_mocha
from tff_pdp.algorithms.mr_mtl import build_mr_mtl
from tff_pdp.config import PrivacyConfig
from tff_pdp.data.datasets import build_heterogeneous_cifar10, build_leaf, build_rotated_mnist, build_silo_files
from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Model
from tff_pdp.models.cnn import build_cnn
from tff_pdp.models.linear_regression import build_linear_regression
from tff_pdp.models.linear_svm import build_linear_svm
from tff_pdp.models.mlp import build_linear, build_mlp
from tff_pdp.privacy.plan import PlannedTraining, PrivacyPlan
from tff_pdp.privacy.silo_example_plan import build_no_privacy_plan, build_silo_example_plan

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "local_only": build_local_only,
    "fed_avg": build_fed_avg,
    "finetune": build_finetune,
    "mr_mtl": build_mr_mtl,
    "ditto": build_ditto,
    "mocha": build_mocha,
    "ifca": build_ifca,
    "ifca_fed_avg": build_ifca_fed_avg,
    "ifca_local": build_ifca_local,
    "ifca_finetune": build_ifca_finetune,
    "ifca_mr_mtl": build_ifca_mr_mtl,
}

MODELS: dict[str, Callable[..., Model]] = {
    "linear": build_linear,
    "linear_regression": build_linear_regression,
    "linear_svm": build_linear_svm,
    "mlp": build_mlp,
    "cnn": build_cnn,
}

PLANS: dict[str, Callable[[PrivacyConfig, PlannedTraining], PrivacyPlan]] = {
    "silo_example": build_silo_example_plan,
    "none": build_no_privacy_plan,
}

DATASETS: dict[str, Callable[..., RawData]] = {
    "leaf": build_leaf,
    "silo_files": build_silo_files,
    "rotated_mnist": build_rotated_mnist,
    "heterogeneous_cifar10": build_heterogeneous_cifar10,
}


def lookup(registry: Mapping[str, Any], name: str, key: str) -> Any:
    """Returns a registered builder.

    Raises:
      ConfigError: the name is not registered; the message lists those that are.
    """
    if name not in registry:
        raise ConfigError(f"{key}: {name!r} is not known; known: {', '.join(sorted(registry))}")
    return registry[name]
