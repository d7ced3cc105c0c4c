"""Calibrates the noise of every silo to a budget, for plans that protect a silo's records inside the silo."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting

from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    calibrate_noise_multiplier,
    next_float32,
    poisson_gaussian_event,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.calibration import (
    asymptotic_noise_multiplier,
    paper_noise_multiplier,
    rounds_within_budget,
)
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent
from tff_pdp.privacy.accounting.kept import side_by_side
from tff_pdp.privacy.accounting.repeated_runs import calibrate_repeated_runs, most_runs
from tff_pdp.privacy.mechanisms.parameters import SiloMechanism
from tff_pdp.privacy.plans.extension import FurtherRounds, check_rest
from tff_pdp.privacy.plans.plan import PlannedTraining, drawn_noise_event

# Reason of gradients in the ledger.
GRADIENTS = "DP-SGD training"
CALIBRATIONS = {
    "tightest": calibrate_noise_multiplier,
    "paper_rdp": paper_noise_multiplier,
    "paper_asymptotic": asymptotic_noise_multiplier,
}


class PlannedSilo(NamedTuple):
    """A silo for which noise is calibrated.

    Attributes:
      client_id: name of the silo.
      budget: the budget that noise is calibrated to: the silo's own budget or, with level `minimum`, one with the
        smallest epsilon of all silos.
      sampling_rate: q, the probability that an example is in a batch.
      released_before: releases of the silo outside of rounds, and the event that charges for drawn noise.
    """

    client_id: str
    budget: SiloBudget
    sampling_rate: float
    released_before: list[dp_accounting.DpEvent]


def calibrated_silos(settings: Any, training: PlannedTraining, noise_and_last_round: Callable) -> dict[str, Any]:
    """Calibrates every silo's noise to its own budget or, with level `minimum`, to the smallest epsilon of all silos.

    Args:
      settings: settings with batch size, clip norm, noise multiplier, budgets and generator.
      training: the silos' releases, and how often each is made.
      noise_and_last_round: picklable function `(settings, training, silo) -> (noise multiplier, last round)`.

    Returns:
      Fields of `SiloExamplePlan` by name.

    Raises:
      ConfigError: a budget is missing, a delta is too large to protect examples, or `noise_multiplier` is given
        together with level `minimum`.
      BudgetError: a budget cannot be met, or no budget pays for a round.
    """
    if settings.noise_multiplier is not None and settings.budgets.level != "own":
        raise ConfigError(
            f"privacy.budgets.level {settings.budgets.level} sets the noise: leave out privacy.noise_multiplier"
        )
    silos, drawn_noise = [], {}
    budgets = settings.budgets_of(sorted(training.num_examples))
    for client_id, budget in settings.budgets.calibrated_to(budgets).items():
        size = training.num_examples[client_id]
        check_delta(client_id, budget, size)
        released_before = training.released_before(client_id)
        if values := _noise_values(training, client_id):
            drawn_noise[client_id] = drawn_noise_event(values)
            released_before.append(drawn_noise[client_id])
        silos.append(PlannedSilo(client_id, budget, silo_sampling_rate(settings.batch_size, size), released_before))
    calls = [functools.partial(noise_and_last_round, settings, training, silo) for silo in silos]
    mechanisms, last_rounds, found = {}, {}, []
    for silo, (noise_multiplier, last_round) in zip(silos, side_by_side(calls), strict=True):
        last_rounds[silo.client_id] = last_round
        found.append(noise_multiplier)
        mechanisms[silo.client_id] = silo_mechanism(
            settings.clip_norm, noise_multiplier, silo.sampling_rate, training.num_examples[silo.client_id]
        )
    if training.earlier is not None and settings.noise_multiplier is None:
        further = [_further(training, silo, own) for silo, own in zip(silos, found, strict=True)]
        check_rest(training.earlier, further, training.paid_rounds, Adjacency.ADD_OR_REMOVE_ONE)
    if not any(last > training.free_rounds for last in last_rounds.values()):
        raise BudgetError(
            f"No silo's budget pays for a single {'further ' if training.earlier else ''}round with "
            f"privacy.noise_multiplier {settings.noise_multiplier:g}: use more noise, or larger budgets"
        )
    return {
        "mechanisms": mechanisms,
        "budgets": budgets,
        "num_examples": dict(training.num_examples),
        "gradients_per_round": dict(training.gradients_per_round),
        "rounds": training.rounds,
        "last_rounds": last_rounds,
        "free_rounds": training.free_rounds,
        "earlier": training.earlier,
        "drawn_noise": drawn_noise,
        "num_parameters": training.num_parameters,
        "generator": settings.generator,
    }


def _further(training: PlannedTraining, silo: PlannedSilo, noise_multiplier: float) -> FurtherRounds:
    """Describes the further rounds of a silo whose earlier rounds are over, for `check_rest`."""
    assert training.earlier is not None
    gradients = training.earlier.gradients(silo.client_id, GRADIENTS)
    noise_so_far = gradients[-1][0] if gradients else math.inf
    steps = training.paid_rounds * training.gradients_per_round[silo.client_id]
    # Without noise nothing adds up.
    event = poisson_gaussian_event(silo.sampling_rate, noise_so_far, steps) if 0 < noise_so_far < math.inf else None
    return FurtherRounds(silo.client_id, silo.budget, noise_multiplier, noise_so_far, [event] if event else [])


def _noise_values(training: PlannedTraining, client_id: str) -> int:
    """Counts the values of noise that are drawn for a silo's gradients, in all runs of a search."""
    runs = 1 if training.search is None else 1 + most_runs(training.search.runs)
    # Noise is drawn in pairs, the last of which may be for one value.
    values = 2 * math.ceil(training.num_parameters / 2) * training.gradients_per_round[client_id]
    return values * training.paid_rounds * runs


def check_delta(client_id: str, budget: SiloBudget, num_examples: int) -> None:
    """Checks that a silo's delta is small enough to protect examples.

    Raises:
      ConfigError: delta is not below 1 / number of examples.
    """
    if budget.delta >= 1 / num_examples:
        raise ConfigError(
            f"privacy.budgets: delta {budget.delta:g} of silo {client_id!r} is not below 1 / {num_examples}, its "
            "number of training examples: with that delta, publishing one random record in the clear would count as "
            "private; lower delta"
        )


def silo_mechanism(clip_norm: float, noise_multiplier: float, sampling_rate: float, size: int) -> SiloMechanism:
    """Returns the mechanism of a silo of `size` examples, whose sums are divided by the expected size of a batch."""
    return SiloMechanism(clip_norm, noise_multiplier, sampling_rate, expected_batch_size=sampling_rate * size)


def silo_sampling_rate(batch_size: int, num_examples: int) -> float:
    """Returns the probability with which a silo's examples are drawn, for batches of the expected size `batch_size`."""
    # Rounded up to the grid of the sampler, which compares 23 random bits with the rate.
    return min(1.0, math.ceil(batch_size / num_examples * 2**23) / 2**23)


def noise_and_last_round_of(settings: Any, training: PlannedTraining, silo: PlannedSilo) -> tuple[float, int]:
    """Returns noise multiplier and last round: noise for all rounds, or given noise until the budget is spent."""
    steps, (client_id, budget, sampling_rate, released_before) = training.gradients_per_round[silo.client_id], silo
    selections = _selections(settings, training, budget)
    if settings.noise_multiplier is not None:
        noise_multiplier = next_float32(settings.noise_multiplier)
        event = poisson_gaussian_event(sampling_rate, noise_multiplier, steps)
        first = (selections[0].event, selections[0].count) if selections else None
        paid = rounds_within_budget(budget, event, released_before, training.paid_rounds, first=first)
        return noise_multiplier, training.free_rounds + paid
    try:
        calibrated = CALIBRATIONS[settings.noise_calibration](
            budget.epsilon, budget.delta, sampling_rate, training.paid_rounds * steps, [*released_before, *selections]
        )
    except BudgetError as error:
        if training.earlier is not None:
            # `check_rest` says what is left, and what more rounds would cost.
            return math.inf, training.rounds
        raise BudgetError(f"silo {client_id!r}: {error}") from None
    return next_float32(calibrated), training.rounds


def _selections(
    settings: Any, training: PlannedTraining, budget: SiloBudget
) -> list[dp_accounting.SelfComposedDpEvent]:
    """Lists all private selections of a silo as one event, or none."""
    event = ExponentialMechanismDpEvent(settings.selection_epsilon(budget))
    rounds = max(0, training.selection_rounds - training.free_rounds)
    return [dp_accounting.SelfComposedDpEvent(event, rounds)] if rounds else []


def noise_of_search(settings: Any, training: PlannedTraining, silo: PlannedSilo) -> tuple[float, int]:
    """Returns the noise multiplier with which the pivot run and all other runs fit the budget, and the last round."""
    search, selections = training.search, _selections(settings, training, silo.budget)
    assert search is not None
    try:
        calibrated = calibrate_repeated_runs(
            silo.budget.epsilon,
            silo.budget.delta,
            silo.sampling_rate,
            training.rounds * training.gradients_per_round[silo.client_id],
            search.runs,
            run_events=[*selections, search.score_event],
            pivot_events=selections if search.has_pivot else None,
            fixed_events=silo.released_before,
        )
    except BudgetError as error:
        raise BudgetError(
            f"silo {silo.client_id!r}: {error} For a search these events include the score of every run: raise "
            "tuning.search.score_noise_multiplier, or lower mean_runs."
        ) from None
    return next_float32(calibrated), training.rounds
