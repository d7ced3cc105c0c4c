"""Defines user-level DP as a plan, and builds it: a server that is trusted with single updates releases noised sums.

Plans of the same training without privacy are built here as well, of silos too.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow_privacy
from dp_accounting import dp_event

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    calibrate_noise_multiplier,
    next_float32,
    poisson_gaussian_event,
    solve_noise_multiplier,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget, parse_budgets
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.facts import checked_generator, generator_condition
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.mechanisms.user_noise import (
    AdaptiveClip,
    FixedClip,
    TreeNoise,
    UserMechanism,
    UserNoise,
    parse_user_noise,
    rounds_per_epoch,
)
from tff_pdp.privacy.mechanisms.user_queries import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM
from tff_pdp.privacy.plans.plan import Claim, PlannedTraining, PrivacyPlan, drawn_noise_event
from tff_pdp.privacy.plans.settings import PrivacyConfig
from tff_pdp.privacy.plans.silo_example import build_unprotected_silo_plan

# The one scope of a user-level ledger.
USERS = "all users"
# The reason in the ledger.
UPDATES = "noised sums of users' updates"
# Noise this many times as long as the longest update there can be leaves little to learn from one round.
MOST_NOISE_TO_SIGNAL = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPlan(PrivacyPlan):
    """Protects one user: all examples, and all rounds that the user takes part in.

    Guarantee: with claim `formal` or `formal-conditional`, all that the server releases, the shared model of every
      round included, is (epsilon, delta)-DP for any one user, where the ledger built here bounds epsilon. What is
      computed from it and from one user's own data, such as that user's personal model, is so for all other users
      (joint DP); for the user whose data are in it, it is not.
    Assumes: the server is trusted with users' clipped updates and with who takes part; and what `claim_reason` says.

    Attributes:
      mechanism: public parameters of the noised sums.
      noise: kind of noise and clip.
      num_users: of the population, for which the sampling rate was set.
      num_released: how many values a user releases in a round.
      num_noised: how many of them the noise changes anything by.
      noise_on_own_support: whether users add shares of the noise by themselves, each only where the own update is not
        zero, as a paper does; that protects nobody.
    """

    mechanism: UserMechanism
    noise: UserNoise = dataclasses.field(default_factory=FixedClip)
    num_users: int
    num_released: int
    num_noised: int
    noise_on_own_support: bool = False

    def scope_of(self, client_id: str) -> str:
        """All users together: what is released is about any of them."""
        del client_id
        return USERS

    def cohort(
        self, round_number: int, client_ids: Sequence[str], generator: Callable[[int], ExactDraws]
    ) -> np.ndarray:
        """Who takes part: every user independently with the sampling rate or, with trees, once in an epoch.

        It may be nobody. The rate is honoured as the float64 it is. Drawing takes no longer with more users, except for
        trees.
        """
        if not self.num_released:
            # Nothing leaves anyone, so there is nothing to hide in a cohort.
            return np.arange(len(client_ids))
        if isinstance(self.noise, TreeNoise):
            epoch, number = divmod(round_number - 1, rounds_per_epoch(self.mechanism.sampling_rate))
            order = generator(epoch).permutation(len(client_ids))
            size = math.ceil(len(client_ids) / rounds_per_epoch(self.mechanism.sampling_rate))
            return np.sort(order[number * size : (number + 1) * size])
        return generator(round_number).heads(len(client_ids), self.mechanism.sampling_rate)

    def training_counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """Every round's sum or, with trees, every epoch's."""
        counts: Counter[dp_accounting.DpEvent] = Counter()
        for round_number in range(1, self.rounds + 1) if isinstance(self.noise, TreeNoise) else ():
            counts.update({event: count for event, count, _ in self.charges(scope, round_number)})
        if self.num_released and not isinstance(self.noise, TreeNoise):
            counts[self._round_event()] = self.rounds
        return counts

    def charges(self, scope: str, round_number: int) -> list[tuple[dp_accounting.DpEvent, int, str]]:
        """One noised sum; with trees all of an epoch's, before its first round."""
        del scope
        if not self.num_released:
            return []
        if not isinstance(self.noise, TreeNoise):
            return [(self._round_event(), 1, UPDATES)]
        length = rounds_per_epoch(self.mechanism.sampling_rate)
        if (round_number - 1) % length:
            return []
        steps = min(length, self.rounds - round_number + 1)
        return [(tree_event(self.mechanism.noise_multiplier, steps), 1, UPDATES)]

    def build_query(self, seeds: Any) -> tensorflow_privacy.DPQuery:
        """The query of the server's sums, and with it the state they start from; `seeds` are int64 `[2, 2]`, secret."""
        mechanism = self.mechanism
        if self.noise_on_own_support:
            # Shares of the noise arrive in the records, which are clipped already.
            mechanism = dataclasses.replace(mechanism, clip_norm=math.inf, noise_multiplier=0.0)
        return self.noise.build_query(self.num_released, mechanism, seeds, self.generator)

    @property
    def noise_share(self) -> float:
        """Standard deviation of a user's share of the noise, of which an expected cohort's add up to that of a sum."""
        mechanism = self.mechanism
        if mechanism.noise_multiplier == 0:
            return 0.0
        return mechanism.noise_multiplier * mechanism.clip_norm / math.sqrt(mechanism.expected_cohort)

    @property
    def noise_to_signal(self) -> float:
        """Expected norm of the noise on a round's mean over the clip norm: z sqrt(d) / qN; for trees, of one node's."""
        noise_multiplier = self.noise.sum_noise_multiplier(self.mechanism)
        return noise_multiplier * math.sqrt(self.num_noised) / self.mechanism.expected_cohort

    @property
    def warning(self) -> str:
        """What to say of the noise before training; empty where there is nothing to say."""
        ratio = self.noise_to_signal
        if ratio <= MOST_NOISE_TO_SIGNAL:
            return ""
        users = math.ceil(self.num_users * ratio / MOST_NOISE_TO_SIGNAL)
        noise_multiplier = self.noise.sum_noise_multiplier(self.mechanism)
        return (
            f"The noise on a round's mean is about {ratio:.3g} times as long as the longest mean there can be "
            f"(z sqrt(d) / qN, with z = {noise_multiplier:.3g}, d = {self.num_noised:,} values, "
            f"qN = {self.mechanism.expected_cohort:g} users): little will be learnt. With the same budget, sampling "
            f"rate and rounds it takes some {users:,} users to bring that down to {MOST_NOISE_TO_SIGNAL:g}; or share "
            "fewer values, plan fewer rounds, or raise epsilon."
        )

    def _round_event(self) -> dp_accounting.DpEvent:
        return poisson_gaussian_event(self.mechanism.sampling_rate, self.mechanism.noise_multiplier, 1)


def tree_event(noise_multiplier: float, steps: int) -> dp_accounting.DpEvent:
    """The event of one tree's noised running sums, over so many rounds that no user takes part in twice."""
    if noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    return dp_event.SingleEpochTreeAggregationDpEvent(float(noise_multiplier), int(steps))


# Settings that mean nothing to users, and what they are where they are left out.
_FOR_SILOS = {
    field.name: field.default
    for field in dataclasses.fields(PrivacyConfig)
    if field.name in ("noise_calibration", "sampler", "selection_share", "selection_loss_bound")
}


def build_user_plan(config: PrivacyConfig, training: PlannedTraining) -> UserPlan:
    """Builds user-level DP: cohorts, clip and noise calibrated to one budget for all users.

    Args:
      config: budget, clip norm, `users_per_round`, and `num_users` where their number is not to be taken from the data.
      training: rounds, users, and how much each releases.

    Raises:
      ConfigError: a parameter is missing or out of range, or training releases what a user-level plan does not cover.
      BudgetError: the budget cannot be met.
    """
    plan = _unprotected(config, training)
    budget = parse_budgets(config.budgets, [USERS])[USERS]
    if math.isinf(budget.epsilon):
        raise ConfigError("privacy.budgets: epsilon is infinite; for no privacy, set privacy.plan to none")
    if budget.delta >= 1 / plan.num_users:
        raise ConfigError(
            f"privacy.budgets: delta {budget.delta:g} is not below 1 / {plan.num_users}, the number of users: "
            "publishing one user at random would pass"
        )
    if not SMALLEST_CLIP_NORM <= config.clip_norm <= LARGEST_CLIP_NORM:
        raise ConfigError(
            f"privacy.clip_norm must be positive and finite, between {SMALLEST_CLIP_NORM:g} and "
            f"{LARGEST_CLIP_NORM:g}, not {config.clip_norm!r}"
        )
    if training.num_released and not training.noise_on_own_support:
        plan = dataclasses.replace(plan, drawn_noise={USERS: _drawn_noise(plan, training)})
    noise_multiplier = next_float32(_noise_multiplier(config, plan, budget)) if training.num_released else 0.0
    mechanism = dataclasses.replace(plan.mechanism, clip_norm=config.clip_norm, noise_multiplier=noise_multiplier)
    if isinstance(plan.noise, AdaptiveClip):
        plan.noise.sum_noise_multiplier(mechanism)
    claim, reason = _claim(config, training)
    return dataclasses.replace(plan, claim=claim, claim_reason=reason, budgets={USERS: budget}, mechanism=mechanism)


def build_unprotected_user_plan(config: PrivacyConfig, training: PlannedTraining) -> UserPlan:
    """Builds the same cohorts without clip and noise, for comparison; arguments and errors as above."""
    plan = _unprotected(config, training)
    # There is no norm to adapt where nothing is clipped.
    return dataclasses.replace(plan, noise=FixedClip()) if isinstance(plan.noise, AdaptiveClip) else plan


def build_no_privacy_plan(config: PrivacyConfig, training: PlannedTraining) -> PrivacyPlan:
    """Builds a plan without clipping and noise, for comparison.

    Args:
      config: with `users_per_round`, clients are users, some of whom take part in a round.
      training: what is planned.

    Raises:
      ConfigError: a parameter is out of range.
    """
    if config.users_per_round is not None:
        return build_unprotected_user_plan(config, training)
    return build_unprotected_silo_plan(config, training)


def _unprotected(config: PrivacyConfig, training: PlannedTraining) -> UserPlan:
    _check(config, training)
    num_users = len(training.num_examples) if config.num_users is None else config.num_users
    users_per_round = config.users_per_round
    if users_per_round is None:
        raise ConfigError("privacy.users_per_round is missing: the expected number of users in a round")
    if not 0 < users_per_round <= num_users:
        raise ConfigError(
            f"privacy.users_per_round must be positive and at most {num_users}, the number of users, not "
            f"{users_per_round!r}"
        )
    noise = parse_user_noise(config.user_noise)
    if not isinstance(noise, FixedClip) and (training.noise_on_own_support or training.total_weight is not None):
        raise ConfigError("privacy.user_noise: a paper's variant clips before the server sees it; use kind fixed_clip")
    # What a cohort is drawn with and what is accounted for are the same float64.
    sampling_rate = users_per_round / num_users
    is_tree = isinstance(noise, TreeNoise)
    weight = num_users if training.total_weight is None else training.total_weight
    if is_tree:
        # An epoch has whole rounds, so that cohorts may be smaller than asked for.
        sampling_rate = 1 / rounds_per_epoch(sampling_rate)
    return UserPlan(
        unit="user",
        adjacency=Adjacency.REPLACE_SPECIAL if is_tree else Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="privacy is switched off: no clipping, no noise",
        budgets={},
        rounds=training.rounds,
        mechanism=UserMechanism(math.inf, 0.0, sampling_rate, weight * sampling_rate),
        noise=noise,
        num_users=num_users,
        num_released=training.num_released,
        num_noised=training.num_released if training.num_noised is None else training.num_noised,
        noise_on_own_support=training.noise_on_own_support,
        generator=checked_generator(config.generator),
    )


def _check(config: PrivacyConfig, training: PlannedTraining) -> None:
    if config.num_users is not None and config.num_users < 1:
        raise ConfigError(f"privacy.num_users must be at least 1, not {config.num_users!r}")
    if training.search is not None:
        raise ConfigError("tuning.search is for privacy.plan silo_example")
    if any(training.fixed_events.values()):
        raise ConfigError(
            "privacy.num_examples and privacy.feature_scaling may release nothing of single users: use public forms"
        )
    for key, default in _FOR_SILOS.items():
        if getattr(config, key) != default:
            raise ConfigError(f"privacy.{key} is for silos: leave it out for users")
    if config.noise_multiplier is not None:
        raise ConfigError("privacy.noise_multiplier is for silos that leave; a user-level plan takes epsilon's noise")


def _noise_multiplier(config: PrivacyConfig, plan: UserPlan, budget: SiloBudget) -> float:
    if not isinstance(plan.noise, TreeNoise):
        return calibrate_noise_multiplier(
            budget.epsilon, budget.delta, plan.mechanism.sampling_rate, plan.rounds, list(plan.drawn_noise.values())
        )

    def event(noise_multiplier: float) -> dp_accounting.DpEvent:
        mechanism = dataclasses.replace(plan.mechanism, noise_multiplier=noise_multiplier)
        training = dataclasses.replace(plan, mechanism=mechanism).training_event(USERS)
        return dp_accounting.ComposedDpEvent([training, *plan.drawn_noise.values()])

    length = rounds_per_epoch(plan.mechanism.sampling_rate)
    height = math.ceil(math.log2(min(length, plan.rounds))) + 1
    releases = height * math.ceil(plan.rounds / length)
    return solve_noise_multiplier(
        event,
        budget.epsilon,
        budget.delta,
        plan.adjacency,
        guess=math.sqrt(2 * releases * math.log(1 / budget.delta)) / budget.epsilon,
    )


def _drawn_noise(plan: UserPlan, training: PlannedTraining) -> GridNoiseDpEvent:
    """Noise of every round's sum, and of a count of norms; trees have fewer than two nodes a round.

    Each is drawn in pairs, the last of which may be for one value.
    """
    sums = 2 if isinstance(plan.noise, TreeNoise) else 1
    return drawn_noise_event((sums * (training.num_released + 1) + 2) * plan.rounds)


def _claim(config: PrivacyConfig, training: PlannedTraining) -> tuple[Claim, str]:
    if training.unsound:
        return "none", training.unsound
    public_number = "the number of users is treated as public" if config.num_users is None else ""
    of_bits = generator_condition(checked_generator(config.generator))
    conditions = [condition for condition in (training.condition, public_number, of_bits) if condition]
    if conditions:
        return "formal-conditional", "; ".join(conditions)
    return "formal", (
        "every value that the server releases is a clipped, noised sum over users divided by a public constant; the "
        "server itself is trusted with single updates"
    )
