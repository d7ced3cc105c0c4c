"""Builds the plan of user-level DP, and that of the same training without privacy."""

import dataclasses
import math

import dp_accounting

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import PrivacyConfig
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    calibrate_noise_multiplier,
    next_float32,
    solve_noise_multiplier,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget, parse_budgets
from tff_pdp.privacy.mechanisms.user_noise import (
    AdaptiveClip,
    FixedClip,
    TreeNoise,
    UserMechanism,
    parse_user_noise,
    rounds_per_epoch,
)
from tff_pdp.privacy.mechanisms.user_queries import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM
from tff_pdp.privacy.plans.plan import Claim, PlannedTraining
from tff_pdp.privacy.user_plan import USERS, UserPlan

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
        return calibrate_noise_multiplier(budget.epsilon, budget.delta, plan.mechanism.sampling_rate, plan.rounds)

    def event(noise_multiplier: float) -> dp_accounting.DpEvent:
        mechanism = dataclasses.replace(plan.mechanism, noise_multiplier=noise_multiplier)
        return dataclasses.replace(plan, mechanism=mechanism).training_event(USERS)

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


def _claim(config: PrivacyConfig, training: PlannedTraining) -> tuple[Claim, str]:
    if training.unsound:
        return "none", training.unsound
    public_number = "the number of users is treated as public" if config.num_users is None else ""
    conditions = [condition for condition in (training.condition, public_number) if condition]
    if conditions:
        return "formal-conditional", "; ".join(conditions)
    return "formal", (
        "every value that the server releases is a clipped, noised sum over users divided by a public constant; the "
        "server itself is trusted with single updates"
    )
