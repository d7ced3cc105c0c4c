"""Protects a silo's records inside the silo: settings, plan and builder of silo-specific example-level DP."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

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
from tff_pdp.privacy.accounting.budgets import Budgets, SiloBudget
from tff_pdp.privacy.accounting.calibration import paper_noise_multiplier, rounds_within_budget
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent, hashable
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.accounting.kept import side_by_side
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.accounting.repeated_runs import calibrate_repeated_runs, most_runs
from tff_pdp.privacy.facts import condition_of_examples
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.mechanisms.parameters import Sampler, SiloMechanism
from tff_pdp.privacy.mechanisms.silo_statistics import NumExamples, PublicNumber
from tff_pdp.privacy.plans.plan import Claim, PlannedTraining, PlanSettings, PrivacyPlan, drawn_noise_event
from tff_pdp.privacy.plans.search import Search
from tff_pdp.settings import Positive, Share

if TYPE_CHECKING:
    from tff_pdp.algorithms.auto_prox.estimates import SiloParameters
    from tff_pdp.algorithms.base import Algorithm, GradientEstimator
    from tff_pdp.models.base import Model

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
    """

    mechanisms: Mapping[str, SiloMechanism]
    num_examples: Mapping[str, int]
    gradients_per_round: Mapping[str, int]
    last_rounds: Mapping[str, int]
    selection_rounds: int = 0
    selection_epsilons: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sampler: Sampler = "poisson"

    def estimator(self, model: "Model") -> "GradientEstimator":
        """Builds DP-SGD with the plan's sampler and generator."""
        from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd

        return build_dp_sgd(model, self.sampler, self.generator)

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

    def weights(
        self, num_examples: Mapping[str, int], client_ids: Sequence[str], cap: int, round_number: int
    ) -> np.ndarray:
        """What silos count: their numbers of examples over the mean of those that take part."""
        del cap
        sizes = np.array([num_examples[client_id] for client_id in client_ids], np.float64)
        present = [num_examples[one] for one in num_examples if self.takes_part(one, round_number)]
        return sizes / np.mean(present) if present else sizes

    def claim_of(self, client_id: str) -> tuple[Claim, str]:
        """The claim for one silo: none where it trains without noise."""
        if self.claim != "none" and self.mechanisms[client_id].noise_multiplier == 0:
            return "none", "the silo trained without noise"
        return self.claim, self.claim_reason

    def clients_without_noise(self) -> list[str]:
        """Silos that train without noise under a plan that claims something."""
        if self.claim == "none":
            return []
        return [client_id for client_id, one in self.mechanisms.items() if one.noise_multiplier == 0]

    def client_facts(self, client_id: str) -> dict[str, Any]:
        """What reports say of a silo's mechanism: number of examples, noise, sampling rate, last round."""
        mechanism = self.mechanisms[client_id]
        return {
            "num_train": self.num_examples[client_id],
            "noise_multiplier": mechanism.noise_multiplier,
            "sampling_rate": mechanism.sampling_rate,
            "last_round": self.last_rounds[client_id],
        }

    @property
    def steps(self) -> int:
        """The most noisy gradients of a silo in a whole training."""
        return max(self.gradients_per_round.values()) * self.rounds

    def public_parameters(self, hparams: Mapping[str, np.ndarray]) -> "SiloParameters":
        """Gives what a method's hook is made of: public parameters of all silos.

        Raises:
          ConfigError: a silo leaves before the last round.
        """
        from tff_pdp.algorithms.auto_prox.estimates import SiloParameters

        if any(last < self.rounds for last in self.last_rounds.values()):
            raise ConfigError("prox_weight: auto needs every silo in every round: leave out privacy.noise_multiplier")
        mechanisms = list(self.mechanisms.values())
        return SiloParameters(
            learning_rate=float(hparams["learning_rate"][0]),
            rounds=self.rounds,
            local_steps=hparams["local_steps"],
            num_examples=np.array(list(self.num_examples.values())),
            clip_norm=np.array([mechanism.clip_norm for mechanism in mechanisms]),
            noise_multiplier=np.array([mechanism.noise_multiplier for mechanism in mechanisms]),
            sampling_rate=np.array([mechanism.sampling_rate for mechanism in mechanisms]),
            expected_batch_size=np.array([mechanism.expected_batch_size for mechanism in mechanisms]),
        )

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


class SiloSettings(PlanSettings):
    """Says what is promised where clients are silos, all of whom take part in every round.

    Attributes:
      num_examples: whether silos' numbers of training examples are public, or released with noise.
      sampler: `poisson`, or `paper_shuffled`, for which no guarantee holds.
      selection_loss_bound: the largest loss of one example that counts in a private selection, for a regression.
    """

    num_examples: NumExamples = PublicNumber()  # pyright: ignore[reportIncompatibleVariableOverride]
    sampler: Sampler = "poisson"  # pyright: ignore[reportIncompatibleVariableOverride]
    selection_loss_bound: Positive = 0.1  # pyright: ignore[reportIncompatibleVariableOverride]

    def check(self, algorithm: "Algorithm", weighting: str) -> None:
        """Checks that a method is for silos."""
        check_for_silos(algorithm, weighting)


def check_for_silos(algorithm: "Algorithm", weighting: str) -> None:
    """Checks that a method and a weighting are for silos.

    Raises:
      ConfigError: one is for users.
    """
    if algorithm.adapt is not None:
        raise ConfigError(
            f"algorithms.{algorithm.name} adapts to a client's examples without noise before its model is used, which "
            "does not protect these examples: it is for users, by privacy.kind user, or none with unit user"
        )
    if weighting == "paper_capped_num_examples":
        raise ConfigError(f"training.weighting {weighting!r} is for users; silos have uniform and num_examples")


CALIBRATIONS = {"tightest": calibrate_noise_multiplier, "paper_rdp": paper_noise_multiplier}


class SiloExample(SiloSettings):
    """Protects each record of a silo, inside the silo.

    Attributes:
      budgets: epsilon and delta of each silo.
      clip_norm: C, L2 bound on each example's gradient.
      noise_multiplier: z, the same for all silos; each leaves when its budget is spent. Without it every silo stays to
        the last round, with the noise its own budget asks for.
      noise_calibration: `tightest`, the least noise that a budget allows; or `paper_rdp`, the more of
        `tff_pdp.privacy.accounting.calibration`, to compare with published figures.
      selection_share: of a silo's epsilon, for each private selection of a cluster.
    """

    budgets: Budgets
    clip_norm: Positive = 1.0
    noise_multiplier: Positive | None = None
    noise_calibration: Literal["tightest", "paper_rdp"] = "tightest"
    selection_share: Share = 0.03

    def budgets_of(self, client_ids: Sequence[str]) -> dict[str, SiloBudget]:
        """Returns every silo's budget by client id."""
        return self.budgets.assign(client_ids)

    def fit_budget(self, epsilon: float | None, delta: float | None) -> SiloBudget:
        """Returns what each new silo may spend to be fitted, which has to be given."""
        if epsilon is None or delta is None:
            raise ConfigError(
                "--epsilon and --delta are needed: trained silos' rows are differentially private for their silos' own "
                "examples, and so must be a new silo's, which pays for it from a budget of its own"
            )
        if math.isinf(epsilon):
            raise ConfigError("--epsilon must be finite")
        return SiloBudget(epsilon, delta)

    def build(self, training: PlannedTraining) -> SiloExamplePlan:
        """Builds Poisson DP-SGD in each silo, calibrated to that silo's own budget.

        The sampling rate of silo k is `min(1, batch_size / n_k)`.

        Args:
          training: what the silos release, and how often.

        Raises:
          ConfigError: a budget is missing, a parameter does not suit the training, or examples are not independent.
          BudgetError: a silo's budget cannot be met.
        """
        self.check_rows(training.row_influence)
        if training.search is not None and (self.noise_multiplier is not None or self.noise_calibration != "tightest"):
            raise ConfigError(
                "tuning.search sets the noise so that the whole search fits into the budgets: leave out "
                "privacy.noise_multiplier and privacy.noise_calibration"
            )
        budgets = self.budgets_of(sorted(training.num_examples))
        sampling_rates, selection_epsilons, drawn_noise, calls = {}, {}, {}, []
        for client_id, budget in budgets.items():
            size = training.num_examples[client_id]
            sampling_rates[client_id] = silo_sampling_rate(self.batch_size, size)
            check_delta(client_id, budget, size)
            released_before = [event for event, _ in training.fixed_events.get(client_id, ())]
            selections = None
            if training.selection_rounds:
                selection_epsilons[client_id] = float(np.float32(self.selection_share * budget.epsilon))
                selections = ExponentialMechanismDpEvent(selection_epsilons[client_id]), training.selection_rounds
            steps = training.gradients_per_round[client_id]
            drawn_noise.update(silo_noise(training, client_id))
            released_before += [drawn_noise[client_id]] if client_id in drawn_noise else []
            arguments = (
                client_id,
                budget,
                sampling_rates[client_id],
                steps,
                training.rounds,
                released_before,
                selections,
            )
            if training.search is None:
                calls.append(functools.partial(_noise_and_last_round, self, *arguments))
            else:
                calls.append(functools.partial(_noise_of_search, training.search, *arguments))
        mechanisms, last_rounds = {}, {}
        for client_id, (noise_multiplier, last_round) in zip(budgets, side_by_side(calls), strict=True):
            last_rounds[client_id] = last_round
            mechanisms[client_id] = silo_mechanism(
                self.clip_norm, noise_multiplier, sampling_rates[client_id], training.num_examples[client_id]
            )
        check_some_silo_trains(self.noise_multiplier, last_rounds)
        claim, reason = _claim(self, training)
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
            generator=self.generator,
            sampler=self.sampler,
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


def check_some_silo_trains(noise_multiplier: float | None, last_rounds: Mapping[str, int]) -> None:
    """Checks that with a given noise multiplier not all silos leave before the first round.

    Raises:
      BudgetError: they do.
    """
    if not any(last_rounds.values()):
        raise BudgetError(
            f"No silo's budget pays for a single round with privacy.noise_multiplier {noise_multiplier:g}: give "
            "more noise, or larger budgets"
        )


def _claim(settings: SiloExample, training: PlannedTraining) -> tuple[Claim, str]:
    if settings.sampler == "paper_shuffled":
        return "none", "batches are disjoint parts of a shuffled epoch, while epsilon assumes Poisson sampling"
    if training.unsound:
        return "none", training.unsound
    condition = "the number of training examples of each silo is treated as public"
    if training.num_examples_are_noised:
        condition = (
            "which silos take part is treated as public; all else that depends on a silo's training examples, their "
            "number included, is in its ledger"
        )
    conditions = (condition, training.condition, condition_of_examples(settings.generator))
    return "formal-conditional", "; ".join(filter(None, conditions))


def silo_mechanism(clip_norm: float, noise_multiplier: float, sampling_rate: float, size: int) -> SiloMechanism:
    """The mechanism of a silo of so many examples, whose sums are divided by the expected size of a batch."""
    return SiloMechanism(clip_norm, noise_multiplier, sampling_rate, expected_batch_size=sampling_rate * size)


def silo_sampling_rate(batch_size: int, num_examples: int) -> float:
    """The probability at which a silo's examples are drawn, for batches of some expected size."""
    # Onto the grid of the sampler, which compares 23 random bits with the rate, and upwards.
    return min(1.0, math.ceil(batch_size / num_examples * 2**23) / 2**23)


def _noise_and_last_round(
    settings: SiloExample,
    client_id: str,
    budget: SiloBudget,
    sampling_rate: float,
    steps: int,
    rounds: int,
    released_before: list[dp_accounting.DpEvent],
    selections: tuple[dp_accounting.DpEvent, int] | None,
) -> tuple[float, int]:
    """The noise a budget asks for over all rounds or, where the noise is given, the round at which it is spent."""
    if settings.noise_multiplier is not None:
        noise_multiplier = next_float32(settings.noise_multiplier)
        event = poisson_gaussian_event(sampling_rate, noise_multiplier, steps)
        return noise_multiplier, rounds_within_budget(budget, event, released_before, rounds, first=selections)
    try:
        calibrated = CALIBRATIONS[settings.noise_calibration](
            budget.epsilon, budget.delta, sampling_rate, rounds * steps, [*released_before, *_all(selections)]
        )
    except BudgetError as error:
        raise BudgetError(f"silo {client_id!r}: {error}") from None
    return next_float32(calibrated), rounds


def _all(selections: tuple[dp_accounting.DpEvent, int] | None) -> list[dp_accounting.DpEvent]:
    return [dp_accounting.SelfComposedDpEvent(*selections)] if selections else []


def _noise_of_search(
    search: Search,
    client_id: str,
    budget: SiloBudget,
    sampling_rate: float,
    steps: int,
    rounds: int,
    released_before: list[dp_accounting.DpEvent],
    selections: tuple[dp_accounting.DpEvent, int] | None,
) -> tuple[float, int]:
    """The noise a budget asks for over the pivot run and all repetitions."""
    try:
        calibrated = calibrate_repeated_runs(
            budget.epsilon,
            budget.delta,
            sampling_rate,
            rounds * steps,
            search.runs,
            run_events=[*_all(selections), search.score_event],
            pivot_events=_all(selections) if search.has_pivot else None,
            fixed_events=released_before,
        )
    except BudgetError as error:
        raise BudgetError(
            f"silo {client_id!r}: {error} For a search these events include the score of every run: raise "
            "tuning.search.score_noise_multiplier, or lower mean_runs."
        ) from None
    return next_float32(calibrated), rounds
