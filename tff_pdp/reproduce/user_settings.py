"""Our own experiment with users, and what settings of user-level privacy have in common."""

from tff_pdp.models.metrics import ACCURACY
from tff_pdp.reports.words import USERS
from tff_pdp.reproduce.setting import MNIST_WRITERS, Scale, Setting, Variant

SEEDS = "seeds: batches, cohorts and noise are drawn from small test-only seeds, so these figures are NOT private"
_METHODS = ("local_only", "dp_fed_avg_ft", "centaur", "dp_pfed_dsu", "udp_hypernet", "udp_hypernet_ft")

MNIST_WRITERS_SETTING = Setting(
    name="mnist_writers",
    title="539 real writers, user-level DP",
    metric=ACCURACY,
    inputs=MNIST_WRITERS,
    seed_splits=False,
    clients=USERS,
    methods=_METHODS,
    scales={
        "full": Scale(epsilons=(2.0, 4.0, 8.0, float("inf")), seeds=1, methods=_METHODS),
        "small": Scale(
            epsilons=(8.0,),
            seeds=1,
            methods=_METHODS,
            overrides={"training.rounds": 10},
            deviation="scale: 10 of 60 rounds, and one epsilon",
        ),
    },
    default_scale="full",
    variants=(
        Variant("default", "everyone who wrote MNIST's training images"),
        # At one epsilon, z is the same: the noise on a mean is as much less or more as the clip norm.
        Variant("half_clip", "half the clip norm, 0.25", is_optional=True, overrides={"privacy.clip_norm": 0.25}),
        Variant("double_clip", "twice the clip norm, 1", is_optional=True, overrides={"privacy.clip_norm": 1.0}),
    ),
    deviations=(
        "data: MNIST's 60,000 training images by who wrote them, according to QMNIST; a part of every writer's images "
        "is for test",
        "ε: of each method alone; for all that is trained here together it is more",
        SEEDS,
    ),
)
