"""What the privacy statements of all units are put together from: the claim, the cost of several methods, tuning."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tff_pdp import errors
from tff_pdp.reports import content, privacy_texts
from tff_pdp.reports.client_words import ClientWords


def covered_methods(algorithms: Sequence[content.AlgorithmResult]) -> list[content.AlgorithmResult]:
    """The methods a claim is about: the exported ones, or all where none was exported."""
    return [algorithm for algorithm in algorithms if algorithm.exported] or list(algorithms)


def claim_of(covered: Sequence[content.AlgorithmResult], known_seed: bool, without_noise: str = "") -> tuple[str, str]:
    """The claim and its reason: the weakest of the methods', or none.

    Args:
      covered: the methods that it is about.
      known_seed: a run's noise follows from a fixed seed.
      without_noise: who trained without noise, as a sentence, if anyone did.
    """
    unknown = [algorithm.claim for algorithm in covered if algorithm.claim not in privacy_texts.CLAIMS]
    if unknown:
        raise errors.ConfigError(f'Unknown privacy claim "{unknown[0]}"; known: {", ".join(privacy_texts.CLAIMS)}.')
    if known_seed:
        return "none", "Test mode: all noise follows from a fixed seed, so anyone can subtract it."
    if without_noise:
        return "none", without_noise
    weakest = max(covered, key=lambda algorithm: list(privacy_texts.CLAIMS).index(algorithm.claim))
    return weakest.claim, _sentence(weakest.claim_reason)


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
    known_seed: bool,
) -> dict[str, Any]:
    """What the models of all compared methods cost together, and where that figure comes from.

    Args:
      algorithms: the compared methods.
      words: for the clients.
      spent: the most that one method spent.
      delta: the largest of one method.
      composed_epsilon: from a ledger; without it the sum over methods, which is always an upper bound.
      composed_delta: the delta of `composed_epsilon`.
      recorded_runs: how many training runs `composed_epsilon` covers; default: one a method.
      known_seed: a run's noise follows from a fixed seed.
    """
    runs = recorded_runs or len(algorithms)

    def without_bound(source: str) -> dict[str, Any]:
        return {"methods": runs, "epsilon": math.inf, "delta": 0.0, "source": source}

    if known_seed:
        return without_bound("the fixed test seed")
    if any(not is_private(algorithm.claim) for algorithm in algorithms):
        return without_bound("a method without a proof")
    if composed_epsilon is not None and composed_delta is not None:
        if not math.isfinite(composed_epsilon):
            return without_bound("a run without noise, under a fixed test seed, or with another kind of guarantee")
        return {"methods": runs, "epsilon": composed_epsilon, "delta": composed_delta, "source": "ledger"}
    if not math.isfinite(spent):
        return without_bound(f"{words.many} without noise")
    methods = len(algorithms)
    return {"methods": runs, "epsilon": methods * spent, "delta": methods * delta, "source": "sum over methods"}


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
