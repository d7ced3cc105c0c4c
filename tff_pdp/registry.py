"""Everything that has a name in a configuration: one line per entry, and the file to read for each."""

from collections.abc import Callable

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.fed_avg import build_fed_avg
from tff_pdp.algorithms.local_only import build_local_only
from tff_pdp.algorithms.mr_mtl import build_mr_mtl
from tff_pdp.models.base import Model
from tff_pdp.models.cnn import build_cnn
from tff_pdp.models.mlp import build_linear, build_mlp
from tff_pdp.privacy.plan import PrivacyPlan, build_no_privacy_plan, build_silo_example_plan

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "local_only": build_local_only,
    "fed_avg": build_fed_avg,
    "mr_mtl": build_mr_mtl,
}

MODELS: dict[str, Callable[..., Model]] = {
    "linear": build_linear,
    "mlp": build_mlp,
    "cnn": build_cnn,
}

PLANS: dict[str, Callable[..., PrivacyPlan]] = {
    "silo_example": build_silo_example_plan,
    "none": build_no_privacy_plan,
}
