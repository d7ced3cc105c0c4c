"""Decides, once for a whole training, which silos are liberal: those whose uploads have little noise.

Groups are functions of released updates and of public parameters, so groups cost no further budget. The silos' budgets
themselves are not hidden: `docs/privacy.md` says who can read a budget.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.hyper_parameters import BUDGET_EPSILON, SET_BY_RUNTIME, HParam
from tff_pdp.algorithms.projection.mixtures import fit_mixture, lowest_group
from tff_pdp.algorithms.projection.subspaces import flat_rows
from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Weights

Partition = Literal["by_norm", "known", "declared"]
# With fewer, the liberal silos' updates say little about the other silos' directions.
ENOUGH_LIBERAL_SILOS = 3
_MOST_GROUPS = 3
# Log norms of silos with one budget differ by some hundredths; 0.1 keeps a group of two equal norms from being one of
# its own. The value for raw norms is the one of common implementations.
_SMALLEST_VARIANCE, _SMALLEST_VARIANCE_OF_RAW_NORMS = 1e-2, 1e-6


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rule that parts silos into liberal and strict ones.

    Attributes:
      num_clients: number M of silos.
      partition: `by_norm`, by the norms of the updates in a warm-start round; `known`, by silos' epsilons; `declared`,
        by a bit that each silo uploads.
      liberal_share: fraction of the silos that is liberal where epsilons are known, rounded up to a whole number.
      liberal_epsilon: the least epsilon of a liberal silo; if given, it replaces `liberal_share`.
      paper_raw_norms: whether `by_norm` clusters norms, in two groups, instead of logarithms of norms.

    Raises:
      ConfigError: two settings do not suit each other.
    """

    num_clients: int
    partition: Partition
    liberal_share: float
    liberal_epsilon: float | None
    paper_raw_norms: bool

    def __post_init__(self):
        if self.partition == "declared" and self.liberal_epsilon is None:
            raise ConfigError("partition declared needs liberal_epsilon, the least epsilon of a liberal silo")
        if self.partition == "by_norm" and self.liberal_epsilon is not None:
            raise ConfigError("liberal_epsilon is for partition known or declared; by_norm groups silos by their noise")
        if self.partition != "by_norm" and self.paper_raw_norms:
            raise ConfigError(f"paper_raw_norms is for partition by_norm, not {self.partition}")

    @property
    def has_warm_start(self) -> bool:
        """True if the first round only measures norms: all silos upload, and the shared weights stay as they are."""
        return self.partition == "by_norm"

    @property
    def first_moving_round(self) -> int:
        """The first round, counted from 1, after which the shared weights move."""
        return 2 if self.has_warm_start else 1

    @property
    def hparams(self) -> dict[str, HParam]:
        """The hyper-parameters that the rule needs."""
        index = {"client_index": SET_BY_RUNTIME}
        return index if self.has_warm_start else {**index, "budget_epsilon": BUDGET_EPSILON}

    @property
    def released(self) -> dict[str, Any]:
        """Names and aggregation of what silos release for the rule, besides their updates."""
        names = {"by_norm": {}, "known": {"epsilon": "rows"}, "declared": {"liberal": "rows"}}
        return names[self.partition]

    def release(self, hparams: Mapping[str, Any]) -> dict[str, Weights]:
        """Returns what one silo releases for the rule: nothing, its epsilon, or its bit."""
        if self.has_warm_start:
            return {}
        epsilon = hparams["budget_epsilon"]
        if self.partition == "known":
            return {"epsilon": collections.OrderedDict(epsilon=epsilon)}
        is_liberal = tf.cast(epsilon >= (self.liberal_epsilon or math.inf), tf.float32)
        return {"liberal": collections.OrderedDict(liberal=is_liberal)}

    def decide(self, aggregates: Mapping[str, Any]) -> tf.Tensor:
        """Returns the liberal silos, float32 `[clients]` of 0 and 1, from the first round's aggregates.

        Source of `by_norm`: Liu and Xiong, "Personalized Differentially Private Federated Learning without Exposing
        Privacy Budgets", CIKM 2023, who cluster norms of updates. The logarithm and the criterion for the number of
        groups are our additions, since clusters of raw norms merge groups whose norms differ by a factor.
        """
        if self.partition == "declared":
            return aggregates["liberal"]["rows"]["liberal"]
        if self.partition == "known":
            epsilons = aggregates["epsilon"]["rows"]["epsilon"]
            if self.liberal_epsilon is not None:
                return tf.cast(epsilons >= self.liberal_epsilon, tf.float32)
            # Equal epsilons are ordered by the silos' numbers.
            ranks = tf.argsort(tf.argsort(epsilons, direction="DESCENDING", stable=True))
            return tf.cast(ranks < math.ceil(self.liberal_share * self.num_clients * (1 - 1e-9)), tf.float32)
        return liberal_by_norm(aggregates["update"]["rows"], aggregates["update"]["present"], self.paper_raw_norms)

    def warning(self, state: Mapping[str, Any]) -> str:
        """Returns a warning if fewer than three silos are liberal after the first round, else an empty text."""
        count = int(np.sum(state["is_liberal"]))
        if count >= min(ENOUGH_LIBERAL_SILOS, self.num_clients):
            return ""
        if not count:
            return "no silo is liberal, so that the shared model moves by the plain mean of all silos, as in fed_avg"
        return (
            f"{count} of {self.num_clients} silos are liberal: the shared model follows their data almost alone. Where "
            "silos have different labels, the model learns the labels of liberal silos only; compare with fed_avg"
        )


def liberal_by_norm(rows: Weights, present: tf.Tensor, paper_raw_norms: bool = False) -> tf.Tensor:
    """Finds the liberal silos by the norms of their updates: less noise, smaller norm.

    Mixtures of one, two and three Gaussians with a common variance are fitted to the logarithms of the norms. The
    Bayesian information criterion chooses one mixture. The silos of its component with the smallest mean are liberal;
    if a mixture with one component is best, all silos are liberal.

    Args:
      rows: updates by tensor, float32 `[clients, ...]`.
      present: float32 `[clients]`, 1 for silos that take part, else 0.
      paper_raw_norms: whether to cluster norms, by two Gaussians with variances of their own.

    Returns:
      float32 `[clients]`: 1 for liberal silos, else 0.
    """
    squares = [tf.reduce_sum(tf.square(tf.cast(flat_rows(value), tf.float64)), axis=1) for value in rows.values()]
    norms = tf.sqrt(tf.add_n(squares))
    # A silo whose training has diverged is as far as can be from little noise.
    norms = tf.where(tf.math.is_finite(norms), norms, tf.constant(1e30, tf.float64))
    present = tf.cast(present, tf.float64)
    if paper_raw_norms:
        pair = fit_mixture(norms, present, 2, one_variance=False, smallest_variance=_SMALLEST_VARIANCE_OF_RAW_NORMS)
        return tf.cast(lowest_group([pair]), tf.float32)
    logarithms = tf.math.log(tf.maximum(norms, 1e-30))
    mixtures = [
        fit_mixture(logarithms, present, components, one_variance=True, smallest_variance=_SMALLEST_VARIANCE)
        for components in range(1, min(_MOST_GROUPS, rows_count(rows)) + 1)
    ]
    return tf.cast(lowest_group(mixtures), tf.float32)


def rows_count(rows: Weights) -> int:
    """Returns the number of clients that rows have places for."""
    return next(iter(rows.values())).shape[0]
