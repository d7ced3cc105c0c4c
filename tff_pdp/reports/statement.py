"""The privacy statement of silos: what is protected, against whom, at what cost, and what is not protected at all."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tff_pdp import errors
from tff_pdp.data.row_influence import RowInfluence
from tff_pdp.privacy.facts import unit_of
from tff_pdp.reports import content, privacy_texts, silo_texts, statement_parts
from tff_pdp.reports.client_words import SILOS


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
    known_seed: bool = False,
) -> dict[str, Any]:
    """Builds the statement of silos that protect their records or, where these are rows of a contact graph, people.

    The claim in the headline is the weakest over the exported methods, or over all methods where none was exported. It
    falls to `none` in test mode and where any silo trained without protection: the headline must hold for every reader.

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
      known_seed: a run's noise follows from a fixed seed; such a run is not private.

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
    covered = statement_parts.covered_methods(algorithms)
    claim, reason = statement_parts.claim_of(covered, known_seed, _without_noise(silos))
    if not statement_parts.is_private(claim):
        if_charged = None
    spent = [silo.epsilon_spent for silo in silos]
    largest_delta = max(silo.delta for silo in silos)
    composed = statement_parts.composed_costs(
        algorithms,
        SILOS,
        spent=max(spent),
        delta=largest_delta,
        composed_epsilon=composed_epsilon,
        composed_delta=composed_delta,
        recorded_runs=recorded_runs,
        known_seed=known_seed,
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
            ("Personal models", silo_texts.export_text(statement_parts.is_private(claim), unit)),
            ("If all compared methods are released", privacy_texts.composed_text(composed, SILOS)),
            ("Tuning", tuning),
            ("What is treated as public", silo_texts.public_text(num_examples_are_noised, unit)),
            ("What is not private", silo_texts.held_out_text(search, unit)),
            ("Limits of the implementation", privacy_texts.limits_text()),
        ]
    statement = {
        "unit": unit.name,
        "adjacency": unit.adjacency,
        "protected": unit.protected,
        "row_influence": None if row_influence is None else dataclasses.asdict(row_influence),
        "claim": claim,
        "claim_reason": reason,
        "private": statement_parts.is_private(claim),
        "known_seed": known_seed,
        "covered_methods": [algorithm.name for algorithm in covered],
        "sampler": sampler,
        "clip": clip,
        "steps": steps,
        "epsilon_minimum": min(spent),
        "epsilon_maximum": max(spent),
        "delta_maximum": largest_delta,
        "silos": [_silo_costs(silo) for silo in silos],
        "composed": composed,
        "tuning": statement_parts.tuning_facts(tuned, configurations_tried, if_charged, search),
        "who_sees": silo_texts.who_sees(claim, unit),
        "paragraphs": statement_parts.titled(paragraphs),
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
    return f"{len(bare)} of {len(silos)} silos trained without noise, for example {bare[0]}." if bare else ""


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
    }
