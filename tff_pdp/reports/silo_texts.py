"""The sentences of the privacy statement of silos, each written so that it can be read alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tff_pdp.privacy.facts import RECORDS, SiloUnit
from tff_pdp.reports import content
from tff_pdp.reports import words as numbers
from tff_pdp.reports.privacy_texts import NO_GUARANTEE, PSEUDONYMS, bounds_text, not_private_text, simulation_row
from tff_pdp.reports.words import SILOS

SAMPLERS: dict[str, str] = {
    "poisson": "In every step each record of a silo takes part independently with the silo's sampling rate, drawn "
    "inside the silo and never shown to anyone (Poisson sampling). The accounting assumes exactly this.",
    "full": "Every record of a silo takes part in every step; the accounting claims no amplification by sampling.",
    "paper_shuffled": "Batches are disjoint parts of a shuffled epoch. The accounting assumes Poisson sampling all the "
    "same, as the published code does, and its ε is too small.",
}


def guarantee_text(spent: Sequence[float], unit: SiloUnit = RECORDS) -> str:
    """The guarantee in numbers."""
    return (
        f"Each silo's {unit.protected} are protected by (ε, δ)-differential privacy, "
        f"with ε {numbers.between(spent, numbers.upper)} for the models of one method."
    )


def several_text(spent: Sequence[float], unit: SiloUnit = RECORDS) -> str:
    """What those get who have several such guarantees, such as a person whose records lie in more than one silo."""
    if unit.several_text:
        return unit.several_text
    text = (
        "The guarantee of a record that lives in one silo is that silo's ε and δ. A person with records in several "
        "silos gets the sum of the ε and the sum of the δ over those silos, and several records in one silo weaken "
        "it further: the guarantee is for one record."
    )
    if len(spent) > 1 and all(map(math.isfinite, spent)):
        both = sum(sorted(spent)[-2:])
        text += f" With one record in each of the two silos that spent most, that is ε = {numbers.upper(both)}."
    return text


def mechanism_text(
    silos: Sequence[content.SiloResult], clip: float, steps: int, sampler: str, unit: SiloUnit = RECORDS
) -> str:
    """Clipping, noise and sampling."""
    several = f" {unit.mechanism_text}" if unit.mechanism_text else ""
    noise = [silo.noise_multiplier for silo in silos]
    rates = [silo.sampling_rate for silo in silos]
    return (
        f"DP-SGD inside each silo, at most {steps} noisy gradients in each training run: every record's gradient is "
        f"clipped to L2 norm {clip:g} over all weights jointly, and Gaussian noise of standard deviation (noise "
        f"multiplier × {clip:g}) is added to the sum before anything leaves the silo. Noise multipliers are set for "
        f"each silo ({numbers.between(noise)}), sampling rates too ({numbers.between(rates)}). {SAMPLERS[sampler]}"
        f"{several}"
    )


def cost_text(silos: Sequence[content.SiloResult], other_releases: Sequence[str], num_examples_are_noised: bool) -> str:
    """Epsilon and delta over silos, spent and targeted, and what else than gradients they cover."""
    proven = [silo for silo in silos if math.isfinite(silo.epsilon_spent)]
    targets = numbers.between([silo.epsilon_target for silo in silos])
    deltas = numbers.between([silo.delta for silo in silos])
    over = [silo.id for silo in proven if silo.epsilon_spent > silo.epsilon_target]
    if not proven:
        return (
            f"No finite ε holds of what one method spent in a silo; that was asked for is {targets}, δ {deltas}. "
            "Calibration set the noise for it, under conditions that are not met here."
        )
    spent = numbers.between([silo.epsilon_spent for silo in proven], numbers.upper)
    where = "silos" if len(proven) == len(silos) else f"the {len(proven)} silos that have one"
    text = f"ε spent by one method is {spent} over {where}, targets are {targets}, δ is {deltas}. " + (
        "Each ε is the silo's budget: training depends on a noised number of records, and only the budget holds for "
        "each number that could have come out."
        if num_examples_are_noised
        else f"Each ε is {bounds_text('silos')}"
    )
    longest = max(silo.last_round for silo in silos)
    early = [silo for silo in silos if silo.last_round < longest]
    if early:
        first = min(early, key=lambda silo: silo.last_round)
        text += (
            f" {len(early)} of {len(silos)} silos left before the last round, when their budget was spent; {first.id} "
            f"first, after round {first.last_round}."
        )
    if other_releases:
        text += f" Besides gradients it covers, of each silo: {'; '.join(other_releases)}."
    if over:
        text += f" Over their target: {len(over)} of {len(silos)} silos, for example {over[0]}."
    return text


def search_text(search: Mapping[str, Any]) -> str:
    """What a private search tried, and that it is paid for."""
    searched, count = " and ".join(search["searched"]), search["candidates"]
    if search["mean_runs"] is None:
        how = f"tried each of {count} candidates once"
        cost = "The ε counts every one of these runs as if it had been released"
    else:
        how = (
            f"made a secret, random number of runs ({search['runs']}, {numbers.plain(search['mean_runs'])} on "
            f"average), each with one of {count} candidates drawn at random"
        )
        cost = "The ε includes this search"
    return (
        f"Searched privately: {searched} of {search['method']}. Each silo {how}, scored every run on its validation "
        "examples with noise, and released its best run alone: model, settings and noisy score. "
        f"{cost}. For this method's models it covers validation examples as it covers training examples."
    )


def public_text(num_examples_are_noised: bool, unit: SiloUnit = RECORDS) -> str:
    """What an observer is assumed to know anyway."""
    if num_examples_are_noised:
        return (
            "Sampling rates, noise multipliers and budgets, the number of steps, the list of silos, and the initial "
            "weights are treated as public. The number of training records of each silo is not: it was released once, "
            "with noise, at a cost that is part of ε, and everything here is computed with that figure."
        )
    return unit.size_text


def unprotected_text() -> str:
    """What stands in place of mechanism and cost where no silo added noise."""
    return (
        "No silo added noise. Models, updates and metrics may reveal any record of any silo; keep them where the raw "
        "data may be kept."
    )


def export_text(is_private: bool, unit: SiloUnit = RECORDS) -> str:
    """What the files beside a served model, and the report, say of personal models."""
    if not is_private:
        return (
            "Nothing is promised of the exported file: every personal model may reveal any record of its silo to "
            "whoever holds the file or can ask with the silo's id. Keep it where the raw data may be kept. "
            f"{PSEUDONYMS}"
        )
    return (
        "Every silo's personal model was computed from public and noised values only. To export it and to answer with "
        "it is post-processing: towards whoever holds the file, or can ask with any silo's id, each silo's "
        f"{unit.protected} keep that silo's ε and δ. Not covered is what holds of a silo as a whole: its model tells "
        f"what its records have in common, and that there is such a silo. {PSEUDONYMS}"
    )


def held_out_text(search: Mapping[str, Any] | None, unit: SiloUnit = RECORDS) -> str:
    """What carries no guarantee at all; `search` as in `statement`."""
    protected = unit.covered
    if search:
        protected += f" and, as far as the models of {search['method']} go, validation examples"
    return not_private_text(protected, SILOS)


def who_sees(claim: str, unit: SiloUnit = RECORDS) -> list[dict[str, str]]:
    """Each observer, what reaches them, and what protects the records, or people, of others from them."""
    if claim in ("empirical", "none"):
        protection = (NO_GUARANTEE,) * 3
    else:
        protection = (
            "The noise is added inside the silo, so the server need not be trusted, where each silo keeps its own key.",
            "Post-processing of the noisy updates: same ε and δ for each silo.",
            f"The personal model is itself (ε, δ)-private in that silo's {unit.protected}, so it may leave the silo.",
        )
    return [
        {
            "who": "The server",
            "sees": "each silo's updates in every round, and what is listed as public",
            "guarantee": protection[0],
        },
        {"who": "Other silos", "sees": "what the server sends to all", "guarantee": protection[1]},
        {
            "who": "Users of a silo's personal model, and whoever holds the exported file",
            "sees": "that model's weights or answers, and those of all silos in the file",
            "guarantee": protection[2],
        },
        {
            "who": "The silo itself",
            "sees": "its own raw records",
            "guarantee": "Not protected from itself.",
        },
        simulation_row(SILOS),
        {
            "who": "Readers of this report",
            "sees": "results of every silo on held-out examples",
            "guarantee": "Not private: these numbers carry no noise.",
        },
    ]
