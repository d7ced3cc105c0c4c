"""Protects a silo's records inside the silo: settings, plan and builder of silo-specific example-level DP."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import dp_accounting
import numpy as np
from msgspec.structs import replace

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    EpsilonBounds,
    poisson_gaussian_event,
)
from tff_pdp.privacy.accounting.budgets import Budgets, SiloBudget
from tff_pdp.privacy.accounting.calibration import (
    label_warning,
    true_budgets,
)
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent, hashable
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.facts import condition_of_examples
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.mechanisms.feature_scaling import DpMoments
from tff_pdp.privacy.mechanisms.parameters import Sampler, SiloMechanism
from tff_pdp.privacy.mechanisms.silo_statistics import NumExamples, PublicNumber
from tff_pdp.privacy.plans.extension import CONDITION
from tff_pdp.privacy.plans.plan import (
    MOST_NOISE_TO_SIGNAL,
    Claim,
    PlannedTraining,
    PlanSettings,
    PrivacyPlan,
)
from tff_pdp.privacy.plans.silo_noise import (
    GRADIENTS,
    calibrated_silos,
    check_delta,
    noise_and_last_round_of,
    noise_of_search,
    silo_mechanism,
    silo_sampling_rate,
)
from tff_pdp.privacy.synthetic.silo_data import SyntheticData
from tff_pdp.settings import Positive, Share

if TYPE_CHECKING:
    from tff_pdp.algorithms.auto_prox.estimates import SiloParameters
    from tff_pdp.algorithms.base import GradientEstimator
    from tff_pdp.models.base import Model

ADAPTED_WITHOUT_NOISE = (
    "personal models are adapted to records without clip and noise; only synthetic data, and what is made of them "
    "alone, are protected"
)
# Reasons in the ledger.
SELECTION, SEARCH = "private cluster selection", "private hyper-parameter search"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloExamplePlan(PrivacyPlan):
    """Protects one example of one silo; neighbouring data sets agree in all other silos.

    Guarantee: with claim `formal` or `formal-conditional`, everything that leaves silo k, and silo k's personal model,
      is (epsilon_k, delta_k)-DP for silo k's training examples, where the plan's ledger bounds epsilon_k.
    Assumes: the conditions in `claim_reason` hold.

    Attributes:
      mechanisms: by client id, parameters of the silo's DP-SGD.
      num_examples: by client id, the number of training examples that mechanisms were planned for; see
        `num_examples_are_noised`.
      gradients_per_round: by client id, number of gradient computations on local data in one round, which is the number
        of local steps times the data passes of a step.
      last_rounds: by client id, the last round that the silo takes part in; a function of parameters only.
      free_rounds: number of rounds, from the first, that cost nothing: they read released data alone, nothing is
        claimed of them, or their cost is in `earlier`.
      selection_rounds: number of rounds, from the first, in which a client selects a cluster.
      selection_epsilons: by client id, epsilon of each cluster selection, a float32; empty without privacy, where
        selections have no noise.
      sampler: sampler of batches.
      labels: by client id, the epsilon that `noise_calibration: paper_asymptotic` states for the silo's noise, which is
        no guarantee; empty with other calibrations.
      num_parameters: d, the number of weights that noise is added to; 0 if unknown.
    """

    mechanisms: Mapping[str, SiloMechanism]
    num_examples: Mapping[str, int]
    gradients_per_round: Mapping[str, int]
    last_rounds: Mapping[str, int]
    free_rounds: int = 0
    selection_rounds: int = 0
    selection_epsilons: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sampler: Sampler = "poisson"
    labels: Mapping[str, float] = dataclasses.field(default_factory=dict)
    num_parameters: int = 0

    def estimator(self, model: "Model") -> "GradientEstimator":
        """Builds DP-SGD with the plan's sampler and generator."""
        from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd

        return build_dp_sgd(model, self.sampler, self.generator)

    def scope_of(self, client_id: str) -> str:
        """Returns the silo's id: every silo is its own scope."""
        return client_id

    def cohort(
        self, round_number: int, client_ids: Sequence[str], generator: Callable[[int], ExactDraws]
    ) -> np.ndarray:
        """Returns the positions of all silos whose budget is not spent yet."""
        return np.flatnonzero([self.takes_part(client_id, round_number) for client_id in client_ids])

    def client_mechanism(self, client_ids: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Returns the silos' parameters by the field names of `SiloMechanism`, `[clients]` each."""
        return {
            field.name: np.array([getattr(self.mechanisms[client_id], field.name) for client_id in client_ids])
            for field in dataclasses.fields(SiloMechanism)
        }

    def weights(
        self, amounts: Mapping[str, float], client_ids: Sequence[str], cap: int, round_number: int
    ) -> np.ndarray:
        """Returns silos' amounts, divided by their mean over the silos that take part in the round."""
        own = np.array([amounts[client_id] for client_id in client_ids], np.float64)
        present = [amounts[one] for one in amounts if self.takes_part(one, round_number)]
        return own / np.mean(present) if present else own

    def claim_of(self, client_id: str) -> tuple[Claim, str]:
        """Returns the claim for one silo and its reason; the claim is `none` if the silo trains without noise."""
        if self.claim != "none" and self.mechanisms[client_id].noise_multiplier == 0:
            return "none", "the silo trained without noise"
        return self.claim, self.claim_reason

    def clients_without_noise(self) -> list[str]:
        """Lists silos that train without noise; empty if the plan claims nothing."""
        if self.claim == "none":
            return []
        return [client_id for client_id, one in self.mechanisms.items() if one.noise_multiplier == 0]

    def client_facts(self, client_id: str) -> dict[str, Any]:
        """Returns a silo's number of examples, its noise, sampling rate and last round, and its label if it has one."""
        mechanism = self.mechanisms[client_id]
        label = {"noise_label": self.labels[client_id]} if self.labels else {}
        return {
            "num_train": self.num_examples[client_id],
            "noise_multiplier": mechanism.noise_multiplier,
            "sampling_rate": mechanism.sampling_rate,
            "last_round": self.last_rounds[client_id],
            "noise_to_signal": self.noise_to_signal(client_id),
            **label,
        }

    def noise_to_signal(self, client_id: str) -> float:
        """Computes the expected norm of the noise on a step's mean gradient, in clip norms: z sqrt(d) / qn."""
        own = self.mechanisms[client_id]
        return own.noise_multiplier * math.sqrt(self.num_parameters) / own.expected_batch_size

    @property
    def warning(self) -> str:
        """Warnings that labels are no epsilons, and that the noise is large; empty where neither is so."""
        return " ".join(filter(None, [label_warning(self.labels, self.budgets), self._noise_warning()]))

    def _noise_warning(self) -> str:
        ratios = {client_id: self.noise_to_signal(client_id) for client_id in self.mechanisms}
        loud = [client_id for client_id, ratio in ratios.items() if ratio > MOST_NOISE_TO_SIGNAL]
        if not loud:
            return ""
        worst = max(loud, key=ratios.__getitem__)
        own = self.mechanisms[worst]
        return (
            f"In {len(loud)} of {len(ratios)} silos the noise on a step's mean gradient is more than "
            f"{MOST_NOISE_TO_SIGNAL:g} times as long as the longest mean there can be; most in {worst!r}, "
            f"{ratios[worst]:.3g} times (z sqrt(d) / qn, with z = {own.noise_multiplier:.3g}, "
            f"d = {self.num_parameters:,} weights, qn = {own.expected_batch_size:.3g} examples): "
            "little will be learnt from a step. With the same budgets, a quarter of the rounds needs about half of the "
            "noise, and a larger privacy.batch_size, a smaller model or a larger epsilon lowers the ratio, too."
        )

    @property
    def steps(self) -> int:
        """The largest number of noisy gradients of a silo in a whole training."""
        further = max(self.gradients_per_round.values()) * (self.rounds - self.free_rounds)
        if self.earlier is None:
            return further
        return further + max(sum(count for _, count in self.noise_before(one)) for one in self.mechanisms)

    def noise_before(self, client_id: str) -> list[tuple[float, int]]:
        """Lists noise multipliers of a silo's gradients in `earlier`, oldest first, each with a number of gradients."""
        return [] if self.earlier is None else self.earlier.gradients(client_id, GRADIENTS)

    def public_parameters(self, hparams: Mapping[str, np.ndarray]) -> "SiloParameters":
        """Returns all silos' public parameters; refuses silos that leave before the last round."""
        from tff_pdp.algorithms.auto_prox.estimates import SiloParameters

        if any(last < self.rounds for last in self.last_rounds.values()):
            raise ConfigError("prox_weight: auto needs every silo in every round: leave out privacy.noise_multiplier")
        return SiloParameters(
            learning_rate=float(hparams["learning_rate"][0]),
            rounds=self.rounds,
            local_steps=hparams["local_steps"],
            num_examples=np.array(list(self.num_examples.values())),
            **self.client_mechanism(list(self.mechanisms)),
        )

    def guaranteed_epsilon(self, ledger: Ledger, client_id: str) -> EpsilonBounds:
        """Returns the epsilon that may be claimed for a silo: the spent epsilon, or the budget.

        If numbers of examples are released with noise, later releases depend on the released number, and the cost might
        differ for another number. Only the budget, which holds for every number, is then a bound.
        """
        if self.num_examples_are_noised:
            return EpsilonBounds(rdp=None, pld=None, best=self.budgets[client_id].epsilon)
        return super().guaranteed_epsilon(ledger, client_id)

    def gradient_event(self, client_id: str) -> dp_accounting.DpEvent:
        """Builds the event of one gradient computation in a silo."""
        mechanism = self.mechanisms[client_id]
        return poisson_gaussian_event(mechanism.sampling_rate, mechanism.noise_multiplier, 1)

    def selection_event(self, client_id: str) -> dp_accounting.DpEvent:
        """Builds the event of one private selection in a silo."""
        return ExponentialMechanismDpEvent(self.selection_epsilons[client_id])

    def search_event(self, client_id: str) -> dp_accounting.DpEvent:
        """Builds the event of all of a silo's runs in a search.

        Raises:
          ConfigError: the plan has no search.
        """
        if self.search is None:
            raise ConfigError("This plan has no search for hyper-parameters.")
        return hashable(self.search.event(self.training_event(client_id)))

    def selection_epsilon(self, client_id: str, round_number: int) -> float:
        """Returns epsilon of a silo's cluster selection in a round: 0 without a selection, infinite without noise."""
        if round_number > self.selection_rounds:
            return 0.0
        return self.selection_epsilons.get(client_id, math.inf)

    def takes_part(self, client_id: str, round_number: int) -> bool:
        """Checks if a silo takes part in a round, counted from 1; known before training."""
        return round_number <= self.last_rounds[client_id]

    def charge_search(self, ledger: Ledger) -> None:
        """Records every silo's search, and the rounds of the pivot run, in the ledger before any run begins."""
        self.charge_drawn_noise(ledger)
        for client_id in self.budgets:
            ledger.append(client_id, self.search_event(client_id), 1, SEARCH)
        for round_number in range(1, self.rounds + 1):
            if self.search and self.search.has_pivot:
                self.charge_round(ledger, round_number)

    def training_counts(self, client_id: str) -> Counter[dp_accounting.DpEvent]:
        """Returns the number of gradients and the number of selections up to a silo's last round."""
        rounds = self.last_rounds[client_id]
        if rounds <= self.free_rounds:
            return Counter()
        paid = (rounds - self.free_rounds) * self.gradients_per_round[client_id]
        counts = Counter({self.gradient_event(client_id): paid})
        if (selections := min(rounds, self.selection_rounds) - self.free_rounds) > 0:
            counts[self.selection_event(client_id)] = selections
        return counts

    def planned_counts(self, client_id: str) -> Counter[dp_accounting.DpEvent]:
        """Counts releases in the training or, with a search, in the search and the pivot run, by event."""
        if self.search is None:
            return self.training_counts(client_id)
        planned = Counter({self.search_event(client_id): 1})
        if self.search.has_pivot:
            planned.update(self.training_counts(client_id))
        return planned

    def charges(self, client_id: str, round_number: int) -> list[tuple[dp_accounting.DpEvent, int, str]]:
        """Lists a silo's gradients and, in the first rounds, its selection; empty where nothing is released."""
        if round_number <= self.free_rounds or not self.takes_part(client_id, round_number):
            return []
        charges = [(self.gradient_event(client_id), self.gradients_per_round[client_id], GRADIENTS)]
        if round_number <= self.selection_rounds:
            charges.append((self.selection_event(client_id), 1, SELECTION))
        return charges


class SiloSettings(PlanSettings):
    """The settings of a plan for silos, which take part in every round that their budgets allow.

    Attributes:
      num_examples: whether silos' numbers of training examples are public, or released with noise.
      sampler: `poisson`, or `paper_shuffled`, for which no guarantee holds.
      selection_loss_bound: bound that each example's loss is clipped to in a private selection; for a regression only.
    """

    num_examples: NumExamples = PublicNumber()  # pyright: ignore[reportIncompatibleVariableOverride]
    sampler: Sampler = "poisson"  # pyright: ignore[reportIncompatibleVariableOverride]
    selection_loss_bound: Positive = 0.1  # pyright: ignore[reportIncompatibleVariableOverride]


class SiloExample(SiloSettings):
    """Protects each record of a silo, inside the silo.

    Attributes:
      budgets: epsilon and delta of each silo.
      clip_norm: C, L2 bound on each example's gradient.
      noise_multiplier: z, equal for all silos; each silo leaves when its budget is spent. By default every silo stays
        to the last round, with the noise that the silo's budget needs.
      noise_calibration: `tightest`, the least noise that a budget allows; `paper_rdp`, the larger noise that the MR-MTL
        paper's released code chooses, to compare with published figures; or `paper_asymptotic`, the noise of the PFA
        paper's released code. With `paper_asymptotic`, epsilons of `budgets` are only labels, and guarantee nothing:
        each silo's budget is the true epsilon of its planned training, which may be smaller or much larger than the
        label.
      selection_share: fraction of a silo's epsilon that each private selection of a cluster costs.
      synthetic: synthetic data that each silo releases before training; none by default.
    """

    budgets: Budgets
    clip_norm: Positive = 1.0
    noise_multiplier: Positive | None = None
    noise_calibration: Literal["tightest", "paper_rdp", "paper_asymptotic"] = "tightest"
    selection_share: Share = 0.03
    synthetic: SyntheticData | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self):
        super().__post_init__()
        if self.synthetic is None:
            return
        if self.noise_calibration == "paper_asymptotic":
            raise ValueError(
                "noise_calibration paper_asymptotic knows DP-SGD alone: use tightest, or leave out synthetic"
            )
        if self.synthetic.is_adapted_privately:
            return
        if self.noise_multiplier is not None:
            raise ValueError("noise_multiplier is for DP-SGD: leave it out, as synthetic.adaptation is non_private")
        if self.num_examples.epsilon is not None or isinstance(self.feature_scaling, DpMoments):
            raise ValueError(
                "with synthetic.adaptation non_private, synthetic data have the whole budget, so nothing is left for "
                "noised num_examples or feature_scaling dp_moments: use public values"
            )

    @property
    def why_it_ends(self) -> str:
        """The reason why a run cannot go on: a formula of noise, or a budget that is divided in advance."""
        if self.noise_calibration == "paper_asymptotic":
            return "privacy.noise_calibration paper_asymptotic sets the noise by a formula that knows no earlier rounds"
        return "privacy.synthetic divides the budget in advance" if self.synthetic is not None else ""

    def fit_budget(self, epsilon: float | None, delta: float | None) -> SiloBudget:
        """Returns the budget for fitting each new silo; `epsilon` and `delta` must not be None."""
        if epsilon is None or delta is None:
            raise ConfigError(
                "--epsilon and --delta are needed: a new silo's personal weights must be differentially private for "
                "the silo's own examples, as trained silos' weights are, and cost a separate budget"
            )
        if math.isinf(epsilon):
            raise ConfigError("--epsilon must be finite: a new silo's fit must be private")
        return SiloBudget(epsilon, delta)

    def build(self, training: PlannedTraining) -> SiloExamplePlan:
        """Builds Poisson DP-SGD in each silo, calibrated to that silo's own budget.

        The sampling rate of silo k is `min(1, batch_size / n_k)`, rounded up to a multiple of 2**-23.

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
        if self.synthetic is not None and not self.synthetic.is_adapted_privately:
            return self._adapted_without_noise(training)
        if self.noise_calibration != "paper_asymptotic":
            return self._calibrated(training)
        if self.sampler != "poisson":
            raise ConfigError(
                f"privacy.noise_calibration paper_asymptotic needs sampler poisson, not {self.sampler}: for shuffled "
                "epochs, no true epsilon is known"
            )
        if self.noise_multiplier is not None or training.num_examples_are_noised:
            raise ConfigError(
                "privacy.noise_calibration paper_asymptotic needs public numbers of examples, as budgets are computed "
                "from them, and sets the noise: set num_examples to public, and leave out privacy.noise_multiplier"
            )
        # With level `minimum` the budget, too, is that of a silo's own label.
        own = replace(self, budgets=replace(self.budgets, level="own"))._calibrated(training)
        releases = {client_id: own.all_counts(client_id) for client_id in own.budgets}
        return dataclasses.replace(
            own if self.budgets.level == "own" else self._calibrated(training),
            budgets=true_budgets(own.budgets, releases, own.adjacency),
            labels={client_id: label.epsilon for client_id, label in own.budgets.items()},
        )

    def _calibrated(self, training: PlannedTraining) -> SiloExamplePlan:
        """Builds the plan with the noise that the calibration chooses, and with the configured budgets."""
        noise = noise_and_last_round_of if training.search is None else noise_of_search
        silos = calibrated_silos(self, training, noise)
        calibrated_to = self.budgets.calibrated_to(silos["budgets"])
        epsilons = {client_id: self.selection_epsilon(budget) for client_id, budget in calibrated_to.items()}
        claim, reason = _claim(self, training)
        return SiloExamplePlan(
            unit="silo_example",
            adjacency=Adjacency.ADD_OR_REMOVE_ONE,
            claim=claim,
            claim_reason=reason,
            selection_rounds=training.selection_rounds,
            selection_epsilons=epsilons if training.selection_rounds else {},
            fixed_events=training.fixed_events,
            sampler=self.sampler,
            num_examples_are_noised=training.num_examples_are_noised,
            search=training.search,
            **silos,
        )

    def _adapted_without_noise(self, training: PlannedTraining) -> SiloExamplePlan:
        """Builds a plan that protects synthetic data alone: models are adapted without clip and noise."""
        budgets = self.budgets_of(sorted(training.num_examples))
        for client_id, size in training.num_examples.items():
            check_delta(client_id, budgets[client_id], size)
        return plan_without_noise(
            self,
            training,
            ADAPTED_WITHOUT_NOISE,
            budgets=budgets,
            free_rounds=training.rounds,
            fixed_events=training.fixed_events,
            num_examples_are_noised=training.num_examples_are_noised,
        )

    def selection_epsilon(self, budget: SiloBudget) -> float:
        """Returns epsilon of one private selection, rounded to a float32."""
        return float(np.float32(self.selection_share * budget.epsilon))


def plan_without_noise(
    settings: SiloSettings, training: PlannedTraining, claim_reason: str, **fields: Any
) -> SiloExamplePlan:
    """Builds a plan for gradients without clip and noise, of which nothing is claimed.

    Args:
      settings: batch size, sampler and generator.
      training: the silos, and their rounds.
      claim_reason: reason why nothing is claimed.
      **fields: further fields of the plan, `budgets` among them.
    """
    fields.setdefault("free_rounds", training.free_rounds)
    mechanisms = {}
    for client_id, size in training.num_examples.items():
        mechanisms[client_id] = silo_mechanism(math.inf, 0.0, silo_sampling_rate(settings.batch_size, size), size)
    return SiloExamplePlan(
        unit="silo_example",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason=claim_reason,
        mechanisms=mechanisms,
        num_examples=dict(training.num_examples),
        gradients_per_round=dict(training.gradients_per_round),
        rounds=training.rounds,
        last_rounds=dict.fromkeys(training.num_examples, training.rounds),
        generator=settings.generator,
        sampler=settings.sampler,
        earlier=training.earlier,
        **fields,
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
    of_extension = CONDITION if training.earlier else ""
    conditions = (condition, training.condition, of_extension, condition_of_examples(settings.generator))
    return "formal-conditional", "; ".join(filter(None, conditions))
