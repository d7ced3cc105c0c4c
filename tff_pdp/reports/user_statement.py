"""The privacy statement of users: what is protected, against whom, at what cost, and what is not protected at all."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tff_pdp import errors
from tff_pdp.reports import content, privacy_texts, statement_parts, user_texts
from tff_pdp.reports.client_words import USERS
from tff_pdp.reports.user_facts import UserCosts, UserSums


def build_user_statement(
    *,
    algorithms: Sequence[content.AlgorithmResult],
    sums: UserSums,
    tuned: Sequence[str] = (),
    configurations_tried: int = 1,
    if_charged: Mapping[str, float] | None = None,
    composed_epsilon: float | None = None,
    composed_delta: float | None = None,
    recorded_runs: int | None = None,
    known_seed: bool = False,
) -> dict[str, Any]:
    """Builds the statement for user-level privacy.

    The claim in the headline is the weakest over the exported methods, or over all methods where none was exported. It
    falls to `none` in test mode and where any of these methods was trained without noise on what users release.

    Args:
      algorithms: the compared methods with their own claims and `user_costs`.
      sums: how what users release is summed and noised.
      tuned: names of the settings that were chosen by looking at results.
      configurations_tried: how many configurations were looked at for that choice, the chosen one included.
      if_charged: `epsilon` at `delta`, if every configuration tried were charged as a release.
      composed_epsilon: epsilon if the models of all compared methods are released, from a ledger; without it the sum
        over methods is stated, which is always an upper bound.
      composed_delta: the delta of `composed_epsilon`.
      recorded_runs: how many training runs `composed_epsilon` covers, replaced ones included; default: one a method.
      known_seed: a run's noise follows from a fixed seed; such a run is not private.

    Returns:
      A JSON-able dict with the keys of `privacy_statement.build_privacy_statement`. As all users share one epsilon,
      `users` is one entry in place of the list `silos`, with the keys of one of its entries and the parameters of the
      noised sums; `noise_to_signal` is by method.
    """
    costs = {algorithm.name: algorithm.user_costs for algorithm in algorithms if algorithm.user_costs is not None}
    if not algorithms or len(costs) < len(algorithms):
        raise errors.ConfigError("A privacy statement of users needs at least one method, and what each cost users.")
    covered = statement_parts.covered_methods(algorithms)
    is_bare = any(costs[algorithm.name].is_bare for algorithm in covered)
    without_noise = f"{user_texts.NO_NOISE.capitalize()}." if is_bare else ""
    claim, reason = statement_parts.claim_of(covered, known_seed, without_noise)
    if not statement_parts.is_private(claim):
        if_charged = None
    worst = max(costs.values(), key=lambda own: own.epsilon_spent)
    composed = statement_parts.composed_costs(
        algorithms,
        USERS,
        spent=worst.epsilon_spent,
        delta=worst.delta,
        composed_epsilon=composed_epsilon,
        composed_delta=composed_delta,
        recorded_runs=recorded_runs,
        known_seed=known_seed,
    )
    paragraphs = [("Claim", privacy_texts.claim_text(claim, reason, covered, user_texts.guarantee_text(worst)))]
    if all(own.is_bare for own in costs.values()):
        paragraphs.append(("What is protected", user_texts.unprotected_text()))
    else:
        tuning = privacy_texts.tuning_text(tuned, configurations_tried, len(algorithms), if_charged, USERS)
        paragraphs += [
            ("Unit of protection", user_texts.unit_text(sums)),
            ("One person who is several users", user_texts.several_text(worst)),
            ("Who is trusted", user_texts.trust_text()),
            *_mechanism(algorithms, sums, is_released=any(own.num_noised for own in costs.values())),
            ("What it cost", user_texts.cost_text(algorithms, worst)),
            ("Personal models", user_texts.personal_text()),
            ("If all compared methods are released", privacy_texts.composed_text(composed, USERS)),
            ("Tuning", tuning),
            ("What is treated as public", user_texts.public_text(sums)),
            ("What is not private", user_texts.held_out_text()),
            ("Limits of the implementation", privacy_texts.limits_text()),
        ]
    is_tree = sums.rounds_per_tree is not None
    statement = {
        "unit": "user",
        "adjacency": "one user's contributions replaced by zero" if is_tree else "add or remove one user",
        "protected": "users",
        "claim": claim,
        "claim_reason": reason,
        "private": statement_parts.is_private(claim),
        "known_seed": known_seed,
        "covered_methods": [algorithm.name for algorithm in covered],
        "sampler": "epochs" if is_tree else "poisson",
        "clip": sums.clip_norm,
        "steps": sums.rounds,
        "users": _user_costs(worst, sums),
        "noise_to_signal": {name: own.noise_to_signal for name, own in costs.items()},
        "composed": composed,
        "tuning": statement_parts.tuning_facts(tuned, configurations_tried, if_charged),
        "who_sees": user_texts.who_sees(claim),
        "paragraphs": statement_parts.titled(paragraphs),
    }
    return content.json_safe(statement)


def _mechanism(
    algorithms: Sequence[content.AlgorithmResult], sums: UserSums, *, is_released: bool
) -> list[tuple[str, str]]:
    if not is_released:
        return [("Mechanism", user_texts.nothing_released_text())]
    return [
        ("Mechanism", user_texts.mechanism_text(sums)),
        ("Noise and signal", user_texts.noise_text(algorithms, sums)),
    ]


def _user_costs(costs: UserCosts, sums: UserSums) -> dict[str, Any]:
    """What every user paid for the costliest method, and the parameters of the sums."""
    # The noise to signal is by method.
    own = {
        key: value for key, value in dataclasses.asdict(costs).items() if key not in ("num_noised", "noise_to_signal")
    }
    names = ("sampling_rate", "num_users", "expected_cohort")
    return {**own, **{name: getattr(sums, name) for name in names}}
