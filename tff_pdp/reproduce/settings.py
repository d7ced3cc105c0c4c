"""All experiments that `tff-pdp reproduce` knows, by name; our own with users; what is unlike their publications."""

from pathlib import Path

from tff_pdp.models.metrics import ACCURACY
from tff_pdp.reports.words import USERS
from tff_pdp.reproduce.pandemic_settings import PANDEMIC_SETTINGS
from tff_pdp.reproduce.pfed_dsu_settings import PFED_DSU_SETTINGS
from tff_pdp.reproduce.setting import MNIST_WRITERS, USER_SEEDS, Scale, Setting, Variant
from tff_pdp.reproduce.silo_settings import SILO_SETTINGS
from tff_pdp.reproduce.udp_settings import UDP_SETTINGS

_WRITERS_METHODS = ("local_only", "dp_fed_avg_ft", "centaur", "dp_pfed_dsu", "udp_hypernet", "udp_hypernet_ft")

MNIST_WRITERS_SETTING = Setting(
    name="mnist_writers",
    title="539 real writers, user-level DP",
    metric=ACCURACY,
    inputs=MNIST_WRITERS,
    seed_splits=False,
    clients=USERS,
    methods=_WRITERS_METHODS,
    scales={
        "full": Scale(epsilons=(2.0, 4.0, 8.0, float("inf")), seeds=1, methods=_WRITERS_METHODS),
        "small": Scale(
            epsilons=(8.0,),
            seeds=1,
            methods=_WRITERS_METHODS,
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
        USER_SEEDS,
    ),
)

SETTINGS = {
    setting.name: setting
    for setting in (*SILO_SETTINGS, *PANDEMIC_SETTINGS, MNIST_WRITERS_SETTING, *UDP_SETTINGS, *PFED_DSU_SETTINGS)
}

_SUBSET = "data: a part of the images, {name}; {paper} has all 50,000, so {consequence}"


def deviations(setting: Setting, scale: Scale, variant: Variant, data_input: Path) -> list[str]:
    """What is unlike the publication in a run, or what else is to be known of it, one sentence each."""
    found = [*variant.deviations, *setting.deviations]
    if scale.deviation:
        found.append(scale.deviation)
    if "subset" in data_input.name:
        is_of_users = setting.clients == USERS
        consequence = "each user has fewer of them" if is_of_users else "the same ε leaves less"
        found.append(_SUBSET.format(name=data_input.name, paper=setting.paper, consequence=consequence))
    return found
