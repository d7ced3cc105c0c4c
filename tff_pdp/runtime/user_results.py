"""What every user paid for a method, and the privacy statement of an experiment whose clients are users."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.privacy.mechanisms.user_noise import AdaptiveClip, TreeNoise, rounds_per_epoch
from tff_pdp.privacy.user_plan import USERS, UserPlan
from tff_pdp.reports.content import AlgorithmResult
from tff_pdp.reports.user_facts import UserCosts, UserSums
from tff_pdp.reports.user_statement import build_user_statement
from tff_pdp.runtime.recorded_costs import Trained, epsilon_fields, epsilon_if_charged, recorded_costs
from tff_pdp.training.checkpoint import Checkpoint


def user_costs(plan: UserPlan, state: Checkpoint) -> UserCosts:
    """What the training of one method cost every user."""
    return UserCosts(
        noise_multiplier=plan.mechanism.noise_multiplier,
        num_noised=plan.num_noised,
        noise_to_signal=plan.noise_to_signal,
        **epsilon_fields(plan.budgets.get(USERS), state.ledger.epsilon(USERS) if state.ledger else None),
    )


def user_statement(
    config: ExperimentConfig, trained: Sequence[Trained], algorithms: Sequence[AlgorithmResult]
) -> dict[str, Any]:
    """The privacy statement."""
    return build_user_statement(
        algorithms=algorithms,
        sums=user_sums(config, trained),
        tuned=config.tuning.tuned,
        configurations_tried=config.tuning.configurations_tried,
        if_charged=_user_if_charged(config, trained),
        known_seed=any(state.run_key.is_test_only for _, state in trained),
        **recorded_costs(config, trained, [USERS]),
    )


def user_sums(config: ExperimentConfig, trained: Sequence[Trained]) -> UserSums:
    """How what users release is summed and noised, by a method that releases something, where there is one."""
    plans = {method.algorithm.title: method.user_plan for method, _ in trained}
    known = {title: plan for title, plan in plans.items() if plan is not None}
    plan = max(known.values(), key=lambda one: one.num_released > 0)
    mechanism, noise = plan.mechanism, plan.noise
    is_adaptive = isinstance(noise, AdaptiveClip)
    return UserSums(
        rounds=plan.rounds,
        num_users=plan.num_users,
        is_constant=config.privacy.num_users is not None,
        sampling_rate=mechanism.sampling_rate,
        expected_cohort=mechanism.expected_cohort,
        clip_norm=mechanism.clip_norm,
        noise_multiplier=mechanism.noise_multiplier,
        quantile=noise.quantile if is_adaptive else None,
        count_stddev=noise.count_stddev * mechanism.expected_cohort if is_adaptive else None,
        sum_noise_multiplier=noise.sum_noise_multiplier(mechanism) if is_adaptive else None,
        rounds_per_tree=rounds_per_epoch(mechanism.sampling_rate) if isinstance(noise, TreeNoise) else None,
        weight_cap=config.training.weight_cap if trained[0][0].is_weighted else None,
        own_support=tuple(title for title, one in known.items() if one.noise_on_own_support),
    )


def _user_if_charged(config: ExperimentConfig, trained: Sequence[Trained]) -> Mapping[str, float] | None:
    """What every user would have spent, had every configuration tried been a release."""
    epsilon = epsilon_if_charged(config, trained, USERS)
    if epsilon is None or not math.isfinite(epsilon):
        return None
    delta = max(state.ledger.budgets[USERS].delta for _, state in trained if state.ledger)
    return {"epsilon": epsilon, "delta": delta}
