"""Builds the privacy statements of silos and of users: what is protected, against whom, at what cost, and what is not.

They are put together from the same parts: the claim, the cost of several methods, tuning.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tff_pdp import errors
from tff_pdp.data.manifest import RowInfluence
from tff_pdp.privacy.facts import Generator, UserCosts, UserSums, claim_of_several, unit_of
from tff_pdp.reports import content, privacy_texts, silo_texts, user_texts
from tff_pdp.reports.words import SILOS, USERS, ClientWords


def covered_methods(algorithms: Sequence[content.AlgorithmResult]) -> list[content.AlgorithmResult]:
    """The methods a claim is about: the exported ones, or all where none was exported."""
    return [algorithm for algorithm in algorithms if algorithm.exported] or list(algorithms)


def claim_of(covered: Sequence[content.AlgorithmResult], without_noise: str = "") -> tuple[str, str]:
    """The claim and its reason: the weakest of the methods', or none.

    Args:
      covered: the methods that it is about.
      without_noise: who trained without noise, as a sentence, if anyone did.
    """
    unknown = [algorithm.claim for algorithm in covered if algorithm.claim not in privacy_texts.CLAIMS]
    if unknown:
        raise errors.ConfigError(f'Unknown privacy claim "{unknown[0]}"; known: {", ".join(privacy_texts.CLAIMS)}.')
    weakest = weakest_of(covered)
    if without_noise and weakest.claim != "none":
        return "none", without_noise
    return weakest.claim, _sentence(weakest.claim_reason)


def weakest_of(algorithms: Sequence[content.AlgorithmResult]) -> content.AlgorithmResult:
    """The first of the methods with the weakest claim."""
    return max(algorithms, key=lambda algorithm: list(privacy_texts.CLAIMS).index(algorithm.claim))


def is_private(claim: str) -> bool:
    """Whether a claim is a guarantee."""
    return claim in ("formal", "formal-conditional")


def composed_costs(
    algorithms: Sequence[content.AlgorithmResult],
    words: ClientWords,
    *,
    spent: float,
    delta: float,
    composed_epsilon: float | None,
    composed_delta: float | None,
    recorded_runs: int | None,
    why_no_bound: str,
    elsewhere: int,
    taken_for_granted: Sequence[str],
) -> dict[str, Any]:
    """What the models of all compared methods cost together: a claim, and where its figure comes from.

    Without a finite epsilon the claim is `none`, and epsilon and delta are None.

    Args:
      algorithms: the compared methods.
      words: for the clients.
      spent: the most that one method spent.
      delta: the largest of one method.
      composed_epsilon: from a ledger; without it the sum over methods, which is always an upper bound.
      composed_delta: the delta of `composed_epsilon`.
      recorded_runs: how many training runs `composed_epsilon` covers; default: one a method.
      why_no_bound: if no epsilon holds for all runs on record, why, as a clause; otherwise empty.
      elsewhere: how many of these runs are in other folders.
      taken_for_granted: of which runs it is not known whether they are about the same records, a sentence each.
    """
    runs = recorded_runs or len(algorithms)
    about = {
        "methods": runs,
        **({"in_other_folders": elsewhere} if elsewhere else {}),
        **({"taken_for_granted": list(taken_for_granted)} if taken_for_granted else {}),
    }

    def without_bound(reason: str) -> dict[str, Any]:
        return {**about, "claim": "none", "claim_reason": reason, "epsilon": None, "delta": None}

    unproven = next((algorithm for algorithm in algorithms if not is_private(algorithm.claim)), None)
    if unproven is not None:
        return without_bound(f"nothing is proven of {unproven.title}: {unproven.claim_reason.strip().rstrip('.')}")
    if why_no_bound:
        return without_bound(why_no_bound)
    if not math.isfinite(spent):
        return without_bound(f"there are {words.many} without noise")
    weakest = weakest_of(algorithms)
    strength, reason = weakest.claim, weakest.claim_reason
    if runs > len(algorithms):
        strength, reason = claim_of_several(strength, reason)
    claim = {**about, "claim": strength, "claim_reason": reason}
    if composed_epsilon is not None and composed_delta is not None:
        # Of one run, too, another computer may have drawn more than is reported here.
        is_more = runs == len(algorithms) == 1 and composed_epsilon > spent * (1 + 1e-6)
        more = {"beyond_these_models": True} if is_more else {}
        return {**claim, **more, "epsilon": composed_epsilon, "delta": composed_delta, "source": "ledger"}
    methods = len(algorithms)
    return {**claim, "epsilon": methods * spent, "delta": methods * delta, "source": "sum over methods"}


def tuning_facts(
    tuned: Sequence[str],
    configurations_tried: int,
    if_charged: Mapping[str, float] | None,
    search: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What was chosen by looking at results, as data."""
    return {
        "tuned": list(tuned),
        "configurations_tried": configurations_tried,
        "search": dict(search) if search else None,
        "if_charged": dict(if_charged) if if_charged else None,
        # Whether all tuning that is known of is paid for.
        "in_epsilon": bool(search) and not tuned,
    }


def titled(paragraphs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Paragraphs as a statement holds them."""
    return [{"heading": heading, "text": text} for heading, text in paragraphs]


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def build_privacy_statement(
    *,
    algorithms: Sequence[content.AlgorithmResult],
    silos: Sequence[content.SiloResult],
    clip: float,
    steps: int,
    sampler: str = "poisson",
    row_influence: RowInfluence | None = None,
    other_releases: Sequence[str] = (),
    num_examples_are_noised: bool = False,
    tuned: Sequence[str] = (),
    configurations_tried: int = 1,
    search: Mapping[str, Any] | None = None,
    if_charged: Mapping[str, float] | None = None,
    composed_epsilon: float | None = None,
    composed_delta: float | None = None,
    recorded_runs: int | None = None,
    why_no_bound: str = "",
    elsewhere: int = 0,
    taken_for_granted: Sequence[str] = (),
    generator: Generator = "philox",
) -> dict[str, Any]:
    """Builds the statement of silos that protect their records or, where these are rows of a contact graph, people.

    The claim in the headline is the weakest over the exported methods, or over all methods where none was exported. It
    falls to `none` where any silo trained without protection: the headline must hold for every reader.

    Args:
      algorithms: the compared methods with their own claims.
      silos: what every silo spent, for one method.
      clip: L2 norm to which each record's gradient is clipped, over all weights jointly.
      steps: noisy gradient computations of one method in one silo, the largest number over the methods.
      sampler: a key of `silo_texts.SAMPLERS`.
      row_influence: what is protected, and in how many records it is; None where each record is.
      other_releases: what the ledgers hold besides gradients, in words.
      num_examples_are_noised: whether silos' numbers of records were released with noise; otherwise they are public.
      tuned: names of the settings that were chosen by looking at results.
      configurations_tried: how many configurations were looked at for that choice, the chosen one included.
      search: a private search that the ledger was charged for: `method`, its title; `searched`, names of
        hyper-parameters; `candidates`, how many combinations of them; `runs`, the distribution of the number of runs,
        and `mean_runs`, its mean, or None where every candidate was tried once.
      if_charged: `epsilon` at `delta` of the silo that spent most, if every configuration tried were charged as a
        release.
      composed_epsilon: largest epsilon over silos if the models of all compared methods are released, from a ledger;
        without it the sum over methods is stated, which is always an upper bound.
      composed_delta: the delta of `composed_epsilon`.
      recorded_runs: how many training runs `composed_epsilon` covers, replaced ones included; default: one a method.
      why_no_bound: if no epsilon holds for all runs on record, why, as a clause; otherwise empty.
      elsewhere: how many of these runs are in other folders.
      taken_for_granted: of which runs it is not known whether they are about the same records, a sentence each.
      generator: of random bits in training.

    Returns:
      A JSON-able dict. `paragraphs` is a list of `{"heading", "text"}`, meant to be shown in order; the other keys hold
      the same facts as data.
    """
    if sampler not in silo_texts.SAMPLERS:
        raise errors.ConfigError(
            f'Unknown sampler "{sampler}" in a privacy statement; known: {", ".join(silo_texts.SAMPLERS)}.'
        )
    if not algorithms or not silos:
        raise errors.ConfigError("A privacy statement needs at least one method and one silo.")
    unit = unit_of(row_influence)
    covered = covered_methods(algorithms)
    claim, reason = claim_of(covered, _without_noise(silos))
    if not is_private(claim):
        if_charged = None
    spent = [silo.epsilon_spent for silo in silos]
    largest_delta = max(silo.delta for silo in silos)
    composed = composed_costs(
        algorithms,
        SILOS,
        spent=max(spent),
        delta=largest_delta,
        composed_epsilon=composed_epsilon,
        composed_delta=composed_delta,
        recorded_runs=recorded_runs,
        why_no_bound=why_no_bound,
        elsewhere=elsewhere,
        taken_for_granted=taken_for_granted,
    )
    searched = silo_texts.search_text(search) if search else ""
    tuning = privacy_texts.tuning_text(tuned, configurations_tried, len(algorithms), if_charged, SILOS, searched)
    paragraphs = [("Claim", privacy_texts.claim_text(claim, reason, covered, silo_texts.guarantee_text(spent, unit)))]
    if all(silo.noise_multiplier == 0 for silo in silos):
        paragraphs.append(("What is protected", silo_texts.unprotected_text()))
    else:
        paragraphs += [
            ("Unit of protection", unit.unit_text),
            (unit.several_heading, silo_texts.several_text(spent, unit)),
            ("Mechanism", silo_texts.mechanism_text(silos, clip, steps, sampler, unit)),
            ("What it cost", silo_texts.cost_text(silos, other_releases, num_examples_are_noised)),
            ("Personal models", silo_texts.export_text(is_private(claim), unit)),
            ("If all compared methods are released", privacy_texts.composed_text(composed, SILOS)),
            ("Tuning", tuning),
            ("What is treated as public", silo_texts.public_text(num_examples_are_noised, unit)),
            ("What is not private", silo_texts.held_out_text(search, unit)),
            ("Limits of the implementation", privacy_texts.limits_text(generator)),
        ]
    statement = {
        "unit": unit.name,
        "adjacency": unit.adjacency,
        "protected": unit.protected,
        "row_influence": None if row_influence is None else dataclasses.asdict(row_influence),
        "claim": claim,
        "claim_reason": reason,
        "private": is_private(claim),
        "covered_methods": [algorithm.name for algorithm in covered],
        "sampler": sampler,
        "generator": generator,
        "clip": clip,
        "steps": steps,
        "epsilon_minimum": math.inf if claim == "none" else min(spent),
        "epsilon_maximum": math.inf if claim == "none" else max(spent),
        "delta_maximum": largest_delta,
        "silos": [_silo_costs(silo) for silo in silos],
        "composed": composed,
        "tuning": tuning_facts(tuned, configurations_tried, if_charged, search),
        "who_sees": silo_texts.who_sees(claim, unit),
        "paragraphs": titled(paragraphs),
    }
    return content.json_safe(statement)


def statement_text(statement: Mapping[str, Any]) -> str:
    """A statement, of silos or users, as plain text, for a terminal or a file beside a model."""
    sections = [f"{paragraph['heading']}\n{paragraph['text']}" for paragraph in statement["paragraphs"]]
    rows = [f"- {row['who']}: {row['sees']}. {row['guarantee']}" for row in statement["who_sees"]]
    sections.insert(2, "Who sees what\n" + "\n".join(rows))
    return "\n\n".join(sections) + "\n"


def _without_noise(silos: Sequence[content.SiloResult]) -> str:
    """A sentence that says which silos added no noise; empty where all did."""
    bare = [silo.id for silo in silos if not (math.isfinite(silo.epsilon_spent) and silo.noise_multiplier > 0)]
    without_budget = all(silo.noise_multiplier > 0 for silo in silos if silo.id in bare)
    what = "have no budget, which alone would hold with noised numbers" if without_budget else "trained without noise"
    return f"{len(bare)} of {len(silos)} silos {what}, for example {bare[0]}." if bare else ""


def _silo_costs(silo: content.SiloResult) -> dict[str, Any]:
    return {
        "id": silo.id,
        "epsilon_target": silo.epsilon_target,
        "epsilon_spent": silo.epsilon_spent,
        "epsilon_rdp": silo.epsilon_rdp,
        "epsilon_pld": silo.epsilon_pld,
        "delta": silo.delta,
        "noise_multiplier": silo.noise_multiplier,
        "sampling_rate": silo.sampling_rate,
        "claim": silo.claim,
        "claim_reason": silo.claim_reason,
    }


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
    why_no_bound: str = "",
    elsewhere: int = 0,
    taken_for_granted: Sequence[str] = (),
    generator: Generator = "philox",
) -> dict[str, Any]:
    """Builds the statement for user-level privacy.

    The claim in the headline is the weakest over the exported methods, or over all methods where none was exported. It
    falls to `none` where any of these methods was trained without noise on what users release.

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
      why_no_bound: if no epsilon holds for all runs on record, why, as a clause; otherwise empty.
      elsewhere: how many of these runs are in other folders.
      taken_for_granted: of which runs it is not known whether they are about the same records, a sentence each.
      generator: of random bits in training.

    Returns:
      A JSON-able dict with the keys of `build_privacy_statement`. As all users share one epsilon,
      `users` is one entry in place of the list `silos`, with the keys of one of its entries and the parameters of the
      noised sums; `noise_to_signal` is by method.
    """
    costs = {algorithm.name: algorithm.user_costs for algorithm in algorithms if algorithm.user_costs is not None}
    if not algorithms or len(costs) < len(algorithms):
        raise errors.ConfigError("A privacy statement of users needs at least one method, and what each cost users.")
    covered = covered_methods(algorithms)
    is_bare = any(costs[algorithm.name].is_bare for algorithm in covered)
    without_noise = f"{user_texts.NO_NOISE.capitalize()}." if is_bare else ""
    claim, reason = claim_of(covered, without_noise)
    if not is_private(claim):
        if_charged = None
    worst = max(costs.values(), key=lambda own: own.epsilon_spent)
    composed = composed_costs(
        algorithms,
        USERS,
        spent=worst.epsilon_spent,
        delta=worst.delta,
        composed_epsilon=composed_epsilon,
        composed_delta=composed_delta,
        recorded_runs=recorded_runs,
        why_no_bound=why_no_bound,
        elsewhere=elsewhere,
        taken_for_granted=taken_for_granted,
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
            ("Limits of the implementation", privacy_texts.limits_text(generator)),
        ]
    is_tree = sums.rounds_per_tree is not None
    statement = {
        "unit": "user",
        "adjacency": "one user's contributions replaced by zero" if is_tree else "add or remove one user",
        "protected": "users",
        "claim": claim,
        "claim_reason": reason,
        "private": is_private(claim),
        "covered_methods": [algorithm.name for algorithm in covered],
        "sampler": "epochs" if is_tree else "poisson",
        "generator": generator,
        "clip": sums.clip_norm,
        "steps": sums.rounds,
        "users": _user_costs(worst, sums),
        "noise_to_signal": {name: own.noise_to_signal for name, own in costs.items()},
        "composed": composed,
        "tuning": tuning_facts(tuned, configurations_tried, if_charged),
        "who_sees": user_texts.who_sees(claim),
        "paragraphs": titled(paragraphs),
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
