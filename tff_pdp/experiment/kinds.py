"""Lists all kinds that a configuration can choose and the modules that define them; only a chosen kind is imported.

Installed packages may add names by entry points in the groups named here; `module:name` names any class or function.
"""

from collections.abc import Callable

from beam_pipelines.options import SourceSettings
from tff_pdp.kinds import Kinds
from tff_pdp.privacy.plans.plan import PlanSettings
from tff_pdp.trackers.base import Tracker

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
        "tfds": f"{_SOURCES}.tfds:Tfds",
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

# Functions `(outputs, y, *, settings)` of one number for each example.
LOSSES: Kinds[Callable] = Kinds(
    "model.loss",
    {
        "softmax_cross_entropy": f"{_MODELS}.base:softmax_cross_entropy",
        "binary_cross_entropy": f"{_MODELS}.losses:binary_cross_entropy",
        "hinge": f"{_MODELS}.dense:hinge",
        "half_squared_error": f"{_MODELS}.base:half_squared_error",
        "absolute_error": f"{_MODELS}.losses:absolute_error",
        "huber": f"{_MODELS}.losses:huber",
        "pinball": f"{_MODELS}.losses:pinball",
    },
    "tff_pdp.losses",
)
# `accuracy`, `mean_squared_error` and `average_precision` are metrics that models have by themselves.
METRICS: Kinds[Callable] = Kinds(
    "model.metric",
    {
        "top_k_accuracy": f"{_MODELS}.losses:top_k_accuracy",
        "mean_absolute_error": f"{_MODELS}.losses:absolute_error",
        "accuracy": f"{_MODELS}.metrics:ExampleMetric",
        "mean_squared_error": f"{_MODELS}.metrics:ExampleMetric",
        "average_precision": f"{_MODELS}.metrics:Ranking",
    },
    "tff_pdp.metrics",
)

# One line on each method, for those who choose one; docs/which_method.md has the evidence.
_ALGORITHM_LINES = {
    "local_only": "Every client trains alone; nothing is shared. The baseline that every other method has to beat.",
    "fed_avg": "One shared model for all clients: the mean of their updates.",
    "finetune": "FedAvg first, then every client goes on alone from the shared model.",
    "mr_mtl": "A model for each client, pulled to the mean of all models; lambda goes from alone (0) to shared.",
    "ditto": "FedAvg's shared model, and a model for each client that is pulled to it; touches data twice.",
    "mocha": "A model for each client, pulled to the models of related clients; relations are learned.",
    "apfl": "Each client predicts with a fixed mixture of the shared model and one of its own.",
    "pfedme": "A shared model that makes each client's own, pulled model good; several gradients in each step.",
    "fed_nova": "FedAvg for clients with different numbers of local steps.",
    "fed_prox": "FedAvg with local steps that stay near the shared model.",
    "scaffold": "FedAvg with corrections for the drift of clients whose data differ.",
    "fed_meta": "A shared start from which a few local steps lead to each client's model: FedMeta, MAML, Reptile.",
    "pppfl": "FedMeta with two stabilisers, for a start that is trained on private synthetic data.",
    "pfa": "FedAvg for budgets that differ: of strict silos' updates, only what fits liberal silos' is kept.",
    "public_only": "FedAvg of the silos with large budgets alone: the control to compare PFA with.",
    "ifca": "Clients choose one of several shared models in every round, privately.",
    "ifca_fed_avg": "Clusters of clients are formed in the first rounds; then FedAvg in each cluster.",
    "ifca_local": "Clusters of clients are formed in the first rounds; then every client goes on alone.",
    "ifca_finetune": "Clusters of clients are formed in the first rounds; then FedAvg in clusters, then all go alone.",
    "ifca_mr_mtl": "Clusters of clients are formed in the first rounds; then MR-MTL in each cluster.",
    "dp_fed_avg_ft": "For users: one shared model, whose head each user tunes before use.",
    "pmtl_ft": "For users: as dp_fed_avg_ft, with heads that stay near the shared head.",
    "pp_sgd": "A shared model, and an addition of each client's own to the head.",
    "fed_per": "A shared body and a head for each client, trained together.",
    "fed_rep": "A shared body and a head for each client, trained one after the other.",
    "centaur": "As fed_rep, with a server optimizer, for users whose updates are noised.",
    "dp_pfed_dsu": "As centaur, with only the body's largest weights: fewer values to add noise to.",
    "hypernet": "A hypernetwork makes each client's model from a small description of the client (pFedHN).",
    "udp_hypernet": "As hypernet, for users whose updates are noised (UDP-Alg); users may tune their model.",
}
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
    _ALGORITHM_LINES,
)

# Functions whose keyword-only parameters are the settings of an entry of `training.trackers`.
_TRACKERS = "tff_pdp.trackers"
TRACKERS: Kinds[Callable[..., Tracker]] = Kinds(
    "training.trackers",
    {
        "tensorboard": f"{_TRACKERS}.tensorboard:build_tensorboard",
        "mlflow": f"{_TRACKERS}.mlflow:build_mlflow",
        "wandb": f"{_TRACKERS}.wandb:build_wandb",
    },
    "tff_pdp.trackers",
)
