"""Defines silo-specific example-level DP as a plan, and builds it: every silo protects its own examples.

It does so inside the silo. The plan of the same training without privacy is built here as well.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import dp_accounting
import numpy as np

from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    EpsilonBounds,
    calibrate_noise_multiplier,
    next_float32,
    poisson_gaussian_event,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget, parse_budgets
from tff_pdp.privacy.accounting.calibration import paper_noise_multiplier, rounds_within_budget
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent, hashable
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.accounting.repeated_runs import calibrate_repeated_runs, most_runs
from tff_pdp.privacy.facts import checked_generator, condition_of_examples
from tff_pdp.privacy.mechanisms.dp_sgd import Sampler, SiloMechanism
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.plans.plan import Claim, PlannedTraining, PrivacyPlan, check_suits_rows, drawn_noise_event
from tff_pdp.privacy.plans.search import Search
from tff_pdp.privacy.plans.settings import PrivacyConfig

# Reasons in the ledger.
GRADIENTS, SELECTION, SEARCH = "DP-SGD training", "private cluster selection", "private hyper-parameter search"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloExamplePlan(PrivacyPlan):
    """Protects one example of one silo, all other silos held fixed.

    Guarantee: with claim `formal` or `formal-conditional`, everything that leaves silo k, and its personal model, is
      (epsilon_k, delta_k)-DP for its own training examples, where the ledger built here bounds epsilon_k.
    Assumes: what `claim_reason` says.

    Attributes:
      mechanisms: by client id.
      num_examples: by client id, the number of training examples that mechanisms were planned for; see
        `num_examples_are_noised`.
      gradients_per_round: by client id, gradient computations on local data in one round: local steps times data
        passes.
      last_rounds: by client id, the last round it takes part in; a function of parameters only.
      selection_rounds: how many rounds, from the first, a client selects a cluster in.
      selection_epsilons: by client id, of each of these selections, and on the grid of float32; empty without privacy,
        where selections are exact up to ties.
      sampler: how batches are drawn.
      num_examples_are_noised: whether numbers of examples were released with noise; otherwise they are public.
      search: what every silo repeats to choose hyper-parameters, where it does.
    """

    mechanisms: Mapping[str, SiloMechanism]
    num_examples: Mapping[str, int]
    gradients_per_round: Mapping[str, int]
    last_rounds: Mapping[str, int]
    selection_rounds: int = 0
    selection_epsilons: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sampler: Sampler = "poisson"
    num_examples_are_noised: bool = False
    search: Search | None = None

    def scope_of(self, client_id: str) -> str:
        """A silo is a scope of its own."""
        return client_id

    def cohort(
        self, round_number: int, client_ids: Sequence[str], generator: Callable[[int], ExactDraws]
    ) -> np.ndarray:
        """Every silo whose budget is not spent yet."""
        del generator
        return np.flatnonzero([self.takes_part(client_id, round_number) for client_id in client_ids])

    def client_mechanism(self, client_ids: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Every silo's `SiloMechanism`, field by field."""
        return {
            field.name: np.array([getattr(self.mechanisms[client_id], field.name) for client_id in client_ids])
            for field in dataclasses.fields(SiloMechanism)
        }

    def guaranteed_epsilon(self, ledger: Ledger, client_id: str) -> EpsilonBounds:
        """The epsilon that may be claimed of a silo: what is spent.

        Where numbers of examples are releases, what follows depends on what came out, and what is spent with the one
        number says nothing of the others: only the budget, kept for each of them, holds.
        """
        if self.num_examples_are_noised:
            return EpsilonBounds(rdp=None, pld=None, best=self.budgets[client_id].epsilon)
        return super().guaranteed_epsilon(ledger, client_id)

    def gradient_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of one gradient computation in a silo."""
        mechanism = self.mechanisms[client_id]
        return poisson_gaussian_event(mechanism.sampling_rate, mechanism.noise_multiplier, 1)

    def selection_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of one private selection in a silo."""
        return ExponentialMechanismDpEvent(self.selection_epsilons[client_id])

    def search_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of all that a silo repeats in a search.

        Raises:
          ConfigError: the plan has no search.
        """
        if self.search is None:
            raise ConfigError("This plan has no search for hyper-parameters.")
        return hashable(self.search.event(self.training_event(client_id)))

    def selection_epsilon(self, client_id: str, round_number: int) -> float:
        """What a silo's selection in a round is run with: 0 for none, infinite for an exact one."""
        if round_number > self.selection_rounds:
            return 0.0
        return self.selection_epsilons.get(client_id, math.inf)

    def takes_part(self, client_id: str, round_number: int) -> bool:
        """Whether a silo takes part in a round, counted from 1; known before training."""
        return round_number <= self.last_rounds[client_id]

    def charge_search(self, ledger: Ledger) -> None:
        """Enters a search for every silo, the pivot run's rounds included, before any of it runs.

        Raises:
          BudgetError: a silo would overspend.
          ConfigError: the plan has no search.
        """
        self.charge_drawn_noise(ledger)
        for client_id in self.budgets:
            ledger.append(client_id, self.search_event(client_id), 1, SEARCH)
        for round_number in range(1, self.rounds + 1):
            if self.search and self.search.has_pivot:
                self.charge_round(ledger, round_number)

    def training_counts(self, client_id: str) -> Counter[dp_accounting.DpEvent]:
        """All gradients and selections up to a silo's last round."""
        rounds = self.last_rounds[client_id]
        counts = Counter({self.gradient_event(client_id): rounds * self.gradients_per_round[client_id]})
        if self.selection_rounds:
            counts[self.selection_event(client_id)] = min(rounds, self.selection_rounds)
        return counts

    def planned_counts(self, client_id: str) -> Counter[dp_accounting.DpEvent]:
        """The search, where there is one, and the training, unless the search goes without."""
        if self.search is None:
            return self.training_counts(client_id)
        planned = Counter({self.search_event(client_id): 1})
        if self.search.has_pivot:
            planned.update(self.training_counts(client_id))
        return planned

    def charges(self, client_id: str, round_number: int) -> list[tuple[dp_accounting.DpEvent, int, str]]:
        """Gradients and, in the first rounds, a selection; nothing once a silo has left."""
        if not self.takes_part(client_id, round_number):
            return []
        charges = [(self.gradient_event(client_id), self.gradients_per_round[client_id], GRADIENTS)]
        if round_number <= self.selection_rounds:
            charges.append((self.selection_event(client_id), 1, SELECTION))
        return charges


CALIBRATIONS = {"tightest": calibrate_noise_multiplier, "paper_rdp": paper_noise_multiplier}


def build_silo_example_plan(config: PrivacyConfig, training: PlannedTraining) -> SiloExamplePlan:
    """Builds silo-specific example-level DP: Poisson DP-SGD in each silo, calibrated to that silo's own budget.

    Args:
      config: budgets, clip norm and expected batch size B; the sampling rate of silo k is `min(1, B / n_k)`.
      training: what the silos release, and how often.

    Raises:
      ConfigError: a budget is missing or malformed, a parameter is out of range, or examples are not independent.
      BudgetError: a silo's budget cannot be met.
    """
    check_suits_rows("silo_example", training.row_influence)
    check_silo_settings(config, training.search)
    budgets = parse_budgets(config.budgets, sorted(training.num_examples))
    mechanisms, selection_epsilons, last_rounds, drawn_noise = {}, {}, {}, {}
    for client_id, budget in budgets.items():
        size = training.num_examples[client_id]
        sampling_rate = silo_sampling_rate(config.batch_size, size)
        check_delta(client_id, budget, size)
        released_before = [event for event, _ in training.fixed_events.get(client_id, ())]
        selections = None
        if training.selection_rounds:
            selection_epsilons[client_id] = float(np.float32(config.selection_share * budget.epsilon))
            selections = ExponentialMechanismDpEvent(selection_epsilons[client_id]), training.selection_rounds
        steps = training.gradients_per_round[client_id]
        drawn_noise.update(silo_noise(training, client_id))
        released_before += [drawn_noise[client_id]] if client_id in drawn_noise else []
        if training.search is None:
            noise_multiplier, last_rounds[client_id] = _noise_and_last_round(
                config, client_id, budget, sampling_rate, steps, training.rounds, released_before, selections
            )
        else:
            last_rounds[client_id] = training.rounds
            noise_multiplier = _noise_of_search(
                client_id,
                budget,
                sampling_rate,
                training.rounds * steps,
                training.search,
                _all(selections),
                released_before,
            )
        mechanisms[client_id] = silo_mechanism(config.clip_norm, noise_multiplier, sampling_rate, size)
    check_some_silo_trains(config, last_rounds)
    claim, reason = _claim(config, training.num_examples_are_noised, training.unsound)
    return SiloExamplePlan(
        unit="silo_example",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim=claim,
        claim_reason=reason,
        mechanisms=mechanisms,
        budgets=budgets,
        num_examples=dict(training.num_examples),
        gradients_per_round=dict(training.gradients_per_round),
        rounds=training.rounds,
        last_rounds=last_rounds,
        selection_rounds=training.selection_rounds,
        selection_epsilons=selection_epsilons,
        fixed_events=training.fixed_events,
        drawn_noise=drawn_noise,
        generator=checked_generator(config.generator),
        sampler=config.sampler,  # type: ignore[arg-type]
        num_examples_are_noised=training.num_examples_are_noised,
        search=training.search,
    )


def silo_noise(training: PlannedTraining, client_id: str) -> dict[str, GridNoiseDpEvent]:
    """By client id, the noise that is drawn for a silo's gradients, in all runs of a search; empty where none is."""
    runs = 1 if training.search is None else 1 + most_runs(training.search.runs)
    # Noise is drawn in pairs, the last of which may be for one value.
    values = 2 * math.ceil(training.num_parameters / 2) * training.gradients_per_round[client_id]
    values *= training.rounds * runs
    return {client_id: drawn_noise_event(values)} if values else {}


def build_unprotected_silo_plan(config: PrivacyConfig, training: PlannedTraining) -> SiloExamplePlan:
    """Builds the same training without clipping and noise, for comparison; arguments as above."""
    check_silo_settings(config, training.search)
    mechanisms = {}
    for client_id, size in training.num_examples.items():
        sampling_rate = silo_sampling_rate(config.batch_size, size)
        mechanisms[client_id] = silo_mechanism(math.inf, 0.0, sampling_rate, size)
    return SiloExamplePlan(
        unit="silo_example",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="privacy is switched off: no clipping, no noise",
        mechanisms=mechanisms,
        budgets={},
        num_examples=dict(training.num_examples),
        gradients_per_round=dict(training.gradients_per_round),
        rounds=training.rounds,
        last_rounds=dict.fromkeys(training.num_examples, training.rounds),
        selection_rounds=training.selection_rounds,
        generator=checked_generator(config.generator),
        sampler=config.sampler,  # type: ignore[arg-type]
        search=training.search,
    )


def check_silo_settings(config: PrivacyConfig, search: Search | None) -> None:
    """Checks the settings of any plan whose clients are silos.

    Raises:
      ConfigError: one is out of range, or is not for silos.
    """
    rules = (
        ("users_per_round", config.users_per_round is None, "left out: silos all take part"),
        ("clip_norm", 0 < config.clip_norm < math.inf, "positive and finite"),
        ("batch_size", config.batch_size >= 1, "at least 1"),
        ("selection_share", 0 < config.selection_share < 1, "between 0 and 1"),
        ("selection_loss_bound", 0 < config.selection_loss_bound < math.inf, "positive and finite"),
        ("noise_multiplier", config.noise_multiplier is None or 0 < config.noise_multiplier < math.inf, "positive"),
        ("sampler", config.sampler in get_args(Sampler), f"one of {', '.join(get_args(Sampler))}"),
        ("noise_calibration", config.noise_calibration in CALIBRATIONS, f"one of {', '.join(CALIBRATIONS)}"),
    )
    for key, holds, wanted in rules:
        if not holds:
            raise ConfigError(f"privacy.{key} must be {wanted}, not {getattr(config, key)!r}")
    if search is not None and (config.noise_multiplier is not None or config.noise_calibration != "tightest"):
        raise ConfigError(
            "tuning.search sets the noise so that the whole search fits into the budgets: leave out "
            "privacy.noise_multiplier and privacy.noise_calibration"
        )


def check_delta(client_id: str, budget: SiloBudget, num_examples: int) -> None:
    """Checks that a silo's delta means something.

    Raises:
      ConfigError: to publish one example at random would be within it.
    """
    if budget.delta >= 1 / num_examples:
        raise ConfigError(
            f"privacy.budgets: delta {budget.delta:g} of silo {client_id!r} is not below 1 / {num_examples}, its "
            "number of training examples: publishing one record at random would pass"
        )


def check_some_silo_trains(config: PrivacyConfig, last_rounds: Mapping[str, int]) -> None:
    """Checks that with a given noise multiplier not all silos leave before the first round.

    Raises:
      BudgetError: they do.
    """
    if not any(last_rounds.values()):
        raise BudgetError(
            f"No silo's budget pays for a single round with privacy.noise_multiplier {config.noise_multiplier:g}: give "
            "more noise, or larger budgets"
        )


def _claim(config: PrivacyConfig, num_examples_are_noised: bool, unsound: str) -> tuple[Claim, str]:
    if config.sampler == "paper_shuffled":
        return "none", "batches are disjoint parts of a shuffled epoch, while epsilon assumes Poisson sampling"
    if unsound:
        return "none", unsound
    condition = "the number of training examples of each silo is treated as public"
    if num_examples_are_noised:
        condition = (
            "which silos take part is treated as public; all else that depends on a silo's training examples, their "
            "number included, is in its ledger"
        )
    return "formal-conditional", f"{condition}; {condition_of_examples(checked_generator(config.generator))}"


def silo_mechanism(clip_norm: float, noise_multiplier: float, sampling_rate: float, size: int) -> SiloMechanism:
    """The mechanism of a silo of so many examples, whose sums are divided by the expected size of a batch."""
    return SiloMechanism(clip_norm, noise_multiplier, sampling_rate, expected_batch_size=sampling_rate * size)


def silo_sampling_rate(batch_size: int, num_examples: int) -> float:
    """The probability at which a silo's examples are drawn, for batches of some expected size."""
    # Onto the grid of the sampler, which compares 23 random bits with the rate, and upwards.
    return min(1.0, math.ceil(batch_size / num_examples * 2**23) / 2**23)


def _noise_and_last_round(
    config: PrivacyConfig,
    client_id: str,
    budget: SiloBudget,
    sampling_rate: float,
    steps: int,
    rounds: int,
    released_before: list[dp_accounting.DpEvent],
    selections: tuple[dp_accounting.DpEvent, int] | None,
) -> tuple[float, int]:
    """The noise a budget asks for over all rounds or, where the noise is given, the round at which it is spent."""
    if config.noise_multiplier is not None:
        noise_multiplier = next_float32(config.noise_multiplier)
        event = poisson_gaussian_event(sampling_rate, noise_multiplier, steps)
        return noise_multiplier, rounds_within_budget(budget, event, released_before, rounds, first=selections)
    try:
        calibrated = CALIBRATIONS[config.noise_calibration](
            budget.epsilon, budget.delta, sampling_rate, rounds * steps, [*released_before, *_all(selections)]
        )
    except BudgetError as error:
        raise BudgetError(f"silo {client_id!r}: {error}") from None
    return next_float32(calibrated), rounds


def _all(selections: tuple[dp_accounting.DpEvent, int] | None) -> list[dp_accounting.DpEvent]:
    return [dp_accounting.SelfComposedDpEvent(*selections)] if selections else []


def _noise_of_search(
    client_id: str,
    budget: SiloBudget,
    sampling_rate: float,
    steps: int,
    search: Search,
    selections: list[dp_accounting.DpEvent],
    released_before: list[dp_accounting.DpEvent],
) -> float:
    """The noise a budget asks for over the pivot run and all repetitions."""
    try:
        calibrated = calibrate_repeated_runs(
            budget.epsilon,
            budget.delta,
            sampling_rate,
            steps,
            search.runs,
            run_events=[*selections, search.score_event],
            pivot_events=selections if search.has_pivot else None,
            fixed_events=released_before,
        )
    except BudgetError as error:
        raise BudgetError(
            f"silo {client_id!r}: {error} For a search these events include the score of every run: raise "
            "tuning.search.score_noise_multiplier, or lower mean_runs."
        ) from None
    return next_float32(calibrated)
