"""Experiments of DP-pFedDSU beside four other methods of user-level privacy, as far as the text tells them.

Source: Wang, Zhang, Gao and Luo, "Differential Privacy Personalized Federated Learning Based on Dynamically Sparsified
Client Updates", section VI, tables II and III.
"""

from collections.abc import Mapping

from tff_pdp.models.metrics import ACCURACY
from tff_pdp.reports.words import USERS
from tff_pdp.reproduce.setting import CIFAR10, MNIST, USER_SEEDS, Inputs, Published, Scale, Setting, Statement, Variant

_PAPER = "the paper of DP-pFedDSU"
_METHODS = ("dp_fed_avg_ft", "pp_sgd", "pmtl_ft", "centaur", "dp_pfed_dsu")
_ALL_METHODS = ("local_only", *_METHODS)
_PAPER_FORM = {"dp_pfed_dsu": {"mask_source": "paper_client_mask"}}

_SOUND = (
    "mask: that of the shared body, the same for all users, with noise on all of it; the paper masks update and noise "
    "by the user's own final weights, and whose data a coordinate comes from is then visible: no ε holds",
    "noise: added to the sum, which is divided by the constant qN; the paper's users add shares, which protect the sum "
    "alone and, where few masks overlap, add up to less, and divides by who took part",
)
_UNSOUND = (
    "claim: none. A coordinate that no other user's mask has moves if and only if the user takes part; ε is that of "
    "the same noise on all coordinates",
)
_DEVIATIONS = (
    "targets: these tables cannot be any. At δ = 1e-5 and with all users in every round, the noise that ε = 1 asks for "
    "in 100 rounds of a ResNet20 is 970 times as long as the longest update there can be, so the published figures, "
    "nearly the same at every ε, are those of heads on an all but random body, or of less noise than described",
    "not stated: δ (1e-5 here), users in a round (all), batch size (100, as in the code of CENTAUR), momentum (none), "
    "the gradient through the mask (straight through), the accountant, repetitions",
    "classes: a user's share of a class is drawn, as in the code of pFedHN; the paper follows FedRep, with equal "
    "shares",
    "normalisation: GroupNorm; BatchNorm's statistics would be averages of private data",
    "fine-tuning: of 15 epochs for the heads of every method before they are used, PP-SGD's included",
    USER_SEEDS,
)
_SMALL_MODEL = {
    "model": {"kind": "cnn", "channels": [8, 16], "hidden_units": 0, "pool_after": "each"},
    "data.shrink": 2,
    "privacy.batch_size": 32,
    "training.rounds": 20,
    **{f"algorithms.{name}.learning_rate": 0.1 for name in _ALL_METHODS},
    **{f"algorithms.{name}.head_learning_rate": 0.1 for name in _METHODS},
    "algorithms.local_only.local_steps": 20,
    **{f"algorithms.{name}.local_steps": 20 for name in _METHODS},
    **{f"algorithms.{name}.head_steps": 60 for name in ("centaur", "dp_pfed_dsu")},
    **{f"algorithms.{name}.adapt_steps": 60 for name in _METHODS},
    # Of two convolutions.
    "algorithms.dp_pfed_dsu.sparse_layers": 1,
}
_SMALL = (
    "a CNN of two convolutions and no normalisation, one of them masked, 20 of {rounds} rounds with so much less "
    "noise, 20 and 60 steps with batches of 32 for 5 and 15 epochs, rates of 0.1 for 0.01 for so few steps without "
    "normalisation"
)


def _published(epsilon: float, *percent: float) -> Published:
    return {(method, epsilon): value / 100 for method, value in zip(_METHODS, percent, strict=True)}


def _variants(values: Mapping[int, Published], default: int) -> tuple[Variant, ...]:
    """By classes of a user: with the sound choices and with the paper's."""
    return tuple(
        Variant(
            "_".join([*["paper"] * is_paper, *([] if classes == default else ["classes", str(classes)])]) or "default",
            f"{classes} classes each{choices}",
            is_paper=is_paper,
            is_optional=classes != default,
            overrides={"data.partition.classes_per_client": classes},
            algorithm_settings=_PAPER_FORM if is_paper else {},
            paper_values=published,
            deviations=_UNSOUND if is_paper else _SOUND,
        )
        for is_paper, choices in ((False, ""), (True, ", the paper's choices"))
        for classes, published in sorted(values.items(), key=lambda item: item[0] != default)
    )


_CIFAR10_SETTING = Setting(
    name="pfed_dsu_cifar10",
    title="DP-pFedDSU on CIFAR-10: 20 users",
    metric=ACCURACY,
    inputs=CIFAR10,
    seed_splits=False,
    paper=_PAPER,
    clients=USERS,
    methods=_ALL_METHODS,
    scales={
        "full": Scale(epsilons=(0.5, 1.0, 2.0), seeds=1, methods=_METHODS),
        "small": Scale(
            epsilons=(0.5, 1.0, 2.0),
            seeds=1,
            methods=_METHODS,
            overrides={**_SMALL_MODEL, "data.input_shape": [16, 16, 3]},
            deviation=f"scale: images of 16 x 16 pixels, {_SMALL.format(rounds=100)}",
        ),
    },
    default_scale="small",
    variants=_variants(
        {
            2: _published(1.0, 83.70, 84.35, 83.34, 85.11, 86.29),
            5: {
                **_published(0.5, 48.84, 51.62, 48.76, 53.40, 55.71),
                **_published(1.0, 49.00, 53.00, 48.86, 53.92, 55.76),
                **_published(2.0, 53.13, 55.50, 52.94, 54.85, 55.94),
            },
            10: _published(1.0, 36.98, 43.02, 36.29, 41.06, 43.92),
        },
        default=5,
    ),
    statements=(
        Statement("dp_pfed_dsu", "centaur", "tables II and III"),
        Statement("centaur", "dp_fed_avg_ft", "tables II and III"),
        Statement("pp_sgd", "dp_fed_avg_ft", "tables II and III"),
        Statement("dp_fed_avg_ft", "pmtl_ft", "tables II and III"),
    ),
    deviations=_DEVIATIONS,
)

_EMNIST_SETTING = Setting(
    name="pfed_dsu_emnist",
    title="DP-pFedDSU on EMNIST: 20 users",
    metric=ACCURACY,
    inputs=Inputs(
        ("emnist/emnist-digits-train-images-idx3-ubyte.gz",),
        "the four idx.gz files of EMNIST's split `digits`, from www.nist.gov/itl/products-and-services/emnist-dataset",
        beside=(
            "emnist-digits-train-labels-idx1-ubyte.gz",
            "emnist-digits-test-images-idx3-ubyte.gz",
            "emnist-digits-test-labels-idx1-ubyte.gz",
        ),
    ),
    seed_splits=False,
    paper=_PAPER,
    clients=USERS,
    methods=_ALL_METHODS,
    scales={
        "full": Scale(epsilons=(1.0,), seeds=1, methods=_METHODS),
        "small": Scale(
            epsilons=(0.5, 1.0, 2.0),
            seeds=1,
            methods=_METHODS,
            overrides={**_SMALL_MODEL, "data.images": "mnist", "data.input_shape": [14, 14, 1]},
            inputs=MNIST,
            deviation=f"scale: MNIST in place of EMNIST, images of 14 x 14 pixels, {_SMALL.format(rounds=50)}",
        ),
    },
    default_scale="small",
    variants=_variants(
        {
            5: _published(1.0, 69.97, 66.80, 69.97, 81.11, 81.80),
            10: _published(1.0, 54.93, 52.89, 54.63, 68.97, 71.87),
        },
        default=5,
    ),
    statements=(
        Statement("dp_pfed_dsu", "centaur", "table II"),
        Statement("centaur", "dp_fed_avg_ft", "table II"),
        Statement("dp_fed_avg_ft", "pp_sgd", "table II"),
    ),
    deviations=(
        "data: EMNIST's digits. Which split the paper takes is not stated; of those with more classes none can be "
        "divided among 20 users with five classes each so that every class is as frequent. By the published figures, "
        "which fall from 5 classes a user to 10, the paper's has more than ten",
        *_DEVIATIONS,
    ),
)

PFED_DSU_SETTINGS = (_CIFAR10_SETTING, _EMNIST_SETTING)
