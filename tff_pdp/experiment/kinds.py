"""Lists all kinds that a configuration can choose and the modules that define them; only a chosen kind is imported.

Installed packages may add names by entry points in the groups named here; `module:name` names any class or function.
"""

from collections.abc import Callable

from beam_pipelines.options import SourceSettings
from tff_pdp.kinds import Kinds
from tff_pdp.privacy.plans.plan import PlanSettings

_SOURCES, _EPIDEMIC = "beam_pipelines.sources", "beam_pipelines.epidemic.sources"
SOURCES: Kinds[type[SourceSettings]] = Kinds(
    "data.kind",
    {
        "leaf": f"{_SOURCES}.leaf:Leaf",
        "silo_files": f"{_SOURCES}.silo_files:SiloFiles",
        "table": f"{_SOURCES}.table:Table",
        "mnist_writers": f"{_SOURCES}.mnist:MnistWriters",
        "fed_emnist": f"{_SOURCES}.fed_emnist:FedEmnist",
        "nist_sd19": f"{_SOURCES}.nist:NistSd19",
        "celeba": f"{_SOURCES}.celeba:Celeba",
        "rotated_mnist": f"{_SOURCES}.rotated_mnist:RotatedMnist",
        "partitioned_images": f"{_SOURCES}.divided:PartitionedImages",
        "fashion_mnist": f"{_SOURCES}.divided:FashionMnist",
        "contact_graph": f"{_EPIDEMIC}:ContactGraph",
        "simulated_outbreak": f"{_EPIDEMIC}:SimulatedOutbreak",
    },
    "tff_pdp.sources",
)

_PLANS = "tff_pdp.privacy.plans"
PLANS: Kinds[type[PlanSettings]] = Kinds(
    "privacy.kind",
    {
        "silo_example": f"{_PLANS}.silo_example:SiloExample",
        "contact_graph": f"{_PLANS}.contact_graph:ContactGraph",
        "user": f"{_PLANS}.user:User",
        "none": f"{_PLANS}.unprotected:Unprotected",
    },
    "tff_pdp.plans",
)

# Models and algorithms are functions whose keyword-only parameters are the settings; their modules import TensorFlow.
_MODELS = "tff_pdp.models"
MODELS: Kinds[Callable] = Kinds(
    "model.kind",
    {
        "linear": f"{_MODELS}.dense:build_linear",
        "linear_regression": f"{_MODELS}.dense:build_linear_regression",
        "linear_svm": f"{_MODELS}.dense:build_linear_svm",
        "logistic_regression": f"{_MODELS}.dense:build_logistic_regression",
        "mlp": f"{_MODELS}.dense:build_mlp",
        "cnn": f"{_MODELS}.convolutional:build_cnn",
        "lenet": f"{_MODELS}.convolutional:build_lenet",
        "tutorial_cnn": f"{_MODELS}.convolutional:build_tutorial_cnn",
        "text": f"{_MODELS}.text:build_text",
        "resnet20": f"{_MODELS}.resnet:build_resnet20",
    },
    "tff_pdp.models",
)

_WHOLE, _PARTS = "tff_pdp.algorithms.whole_models", "tff_pdp.algorithms.shared_parts"
_META = "tff_pdp.algorithms.meta_learning"
ALGORITHMS: Kinds[Callable] = Kinds(
    "algorithms",
    {
        "local_only": f"{_WHOLE}.finetune:build_local_only",
        "fed_avg": f"{_WHOLE}.fed_avg:build_fed_avg",
        "finetune": f"{_WHOLE}.finetune:build_finetune",
        "mr_mtl": f"{_WHOLE}.mr_mtl:build_mr_mtl",
        "ditto": f"{_WHOLE}.ditto:build_ditto",
        "mocha": f"{_WHOLE}.mocha:build_mocha",
        "apfl": f"{_WHOLE}.apfl:build_apfl",
        "pfedme": f"{_WHOLE}.pfedme:build_pfedme",
        "fed_nova": f"{_WHOLE}.fed_nova:build_fed_nova",
        "fed_prox": f"{_WHOLE}.fed_prox:build_fed_prox",
        "scaffold": f"{_WHOLE}.scaffold:build_scaffold",
        "fed_meta": f"{_META}.fed_meta:build_fed_meta",
        "pppfl": f"{_META}.pppfl:build_pppfl",
        "pfa": f"{_WHOLE}.pfa:build_pfa",
        "public_only": f"{_WHOLE}.public_only:build_public_only",
        "ifca": f"{_WHOLE}.ifca:build_ifca",
        "ifca_fed_avg": f"{_WHOLE}.ifca:build_ifca_fed_avg",
        "ifca_local": f"{_WHOLE}.ifca:build_ifca_local",
        "ifca_finetune": f"{_WHOLE}.ifca:build_ifca_finetune",
        "ifca_mr_mtl": f"{_WHOLE}.ifca:build_ifca_mr_mtl",
        "dp_fed_avg_ft": f"{_PARTS}.dp_fed_avg_ft:build_dp_fed_avg_ft",
        "pmtl_ft": f"{_PARTS}.dp_fed_avg_ft:build_pmtl_ft",
        "pp_sgd": f"{_PARTS}.pp_sgd:build_pp_sgd",
        "fed_per": f"{_PARTS}.fed_per:build_fed_per",
        "fed_rep": f"{_PARTS}.centaur:build_fed_rep",
        "centaur": f"{_PARTS}.centaur:build_centaur",
        "dp_pfed_dsu": f"{_PARTS}.dp_pfed_dsu:build_dp_pfed_dsu",
        "hypernet": f"{_PARTS}.udp_hypernet:build_hypernet",
        "udp_hypernet": f"{_PARTS}.udp_hypernet:build_udp_hypernet",
    },
    "tff_pdp.algorithms",
)
