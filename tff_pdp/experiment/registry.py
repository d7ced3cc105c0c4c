"""Everything that has a name in a configuration: one line per entry, and the file to read for each."""

from collections.abc import Callable, Mapping
from typing import Any

from beam_pipelines.epidemic.sources import build_contact_graph, build_simulated_outbreak
from beam_pipelines.raw_data import PreparedSource, RawData
from beam_pipelines.sources.builders import build_leaf, build_partitioned_images, build_rotated_mnist, build_silo_files
from beam_pipelines.sources.user_builders import build_celeba, build_fed_emnist, build_mnist_writers, build_nist_sd19
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.shared_parts.centaur import build_centaur, build_fed_rep
from tff_pdp.algorithms.shared_parts.dp_fed_avg_ft import build_dp_fed_avg_ft, build_pmtl_ft
from tff_pdp.algorithms.shared_parts.dp_pfed_dsu import build_dp_pfed_dsu
from tff_pdp.algorithms.shared_parts.fed_per import build_fed_per
from tff_pdp.algorithms.shared_parts.pp_sgd import build_pp_sgd
from tff_pdp.algorithms.shared_parts.udp_hypernet import build_hypernet, build_udp_hypernet
from tff_pdp.algorithms.whole_models.ditto import build_ditto
from tff_pdp.algorithms.whole_models.fed_avg import build_fed_avg
from tff_pdp.algorithms.whole_models.finetune import build_finetune
from tff_pdp.algorithms.whole_models.ifca import (
    build_ifca,
    build_ifca_fed_avg,
    build_ifca_finetune,
    build_ifca_local,
    build_ifca_mr_mtl,
)
from tff_pdp.algorithms.whole_models.local_only import build_local_only
from tff_pdp.algorithms.whole_models.mocha import build_mocha
from tff_pdp.algorithms.whole_models.mr_mtl import build_mr_mtl
from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Model
from tff_pdp.models.convolutional import build_cnn, build_lenet
from tff_pdp.models.dense import (
    build_linear,
    build_linear_regression,
    build_linear_svm,
    build_logistic_regression,
    build_mlp,
)
from tff_pdp.models.resnet import build_resnet20
from tff_pdp.privacy.plans.contact_graph import build_contact_graph_plan
from tff_pdp.privacy.plans.plan import PlannedTraining, PrivacyPlan
from tff_pdp.privacy.plans.settings import PrivacyConfig
from tff_pdp.privacy.plans.silo_example import build_silo_example_plan
from tff_pdp.privacy.plans.user import build_no_privacy_plan, build_user_plan

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
    "dp_fed_avg_ft": build_dp_fed_avg_ft,
    "pmtl_ft": build_pmtl_ft,
    "pp_sgd": build_pp_sgd,
    "fed_per": build_fed_per,
    "fed_rep": build_fed_rep,
    "centaur": build_centaur,
    "dp_pfed_dsu": build_dp_pfed_dsu,
    "hypernet": build_hypernet,
    "udp_hypernet": build_udp_hypernet,
}

MODELS: dict[str, Callable[..., Model]] = {
    "linear": build_linear,
    "linear_regression": build_linear_regression,
    "linear_svm": build_linear_svm,
    "logistic_regression": build_logistic_regression,
    "mlp": build_mlp,
    "cnn": build_cnn,
    "lenet": build_lenet,
    "resnet20": build_resnet20,
}

PLANS: dict[str, Callable[[PrivacyConfig, PlannedTraining], PrivacyPlan]] = {
    "silo_example": build_silo_example_plan,
    "contact_graph": build_contact_graph_plan,
    "user": build_user_plan,
    "none": build_no_privacy_plan,
}

DATASETS: dict[str, Callable[..., RawData | PreparedSource]] = {
    "leaf": build_leaf,
    "silo_files": build_silo_files,
    "mnist_writers": build_mnist_writers,
    "fed_emnist": build_fed_emnist,
    "nist_sd19": build_nist_sd19,
    "celeba": build_celeba,
    "rotated_mnist": build_rotated_mnist,
    "partitioned_images": build_partitioned_images,
    "contact_graph": build_contact_graph,
    "simulated_outbreak": build_simulated_outbreak,
}


def lookup(registry: Mapping[str, Any], name: str, key: str) -> Any:
    """Returns a registered builder.

    Raises:
      ConfigError: the name is not registered; the message lists those that are.
    """
    if name not in registry:
        raise ConfigError(f"{key}: {name!r} is not known; known: {', '.join(sorted(registry))}")
    return registry[name]
