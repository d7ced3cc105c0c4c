"""Defines the privacy plan, one object that couples unit, adjacency, sampler, clip, noise and the accounting event.

`PlanSettings` is the section `privacy` of an experiment; its subclasses, one for each plan, build the plan from a
`PlannedTraining`. Training takes its sampler and its noise from the plan, and the ledger takes its events from the same
plan, so what runs and what is accounted cannot drift apart. All code that depends on the unit of protection is in a
plan's methods: no other code checks the kind of plan.
"""

import abc
import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import dp_accounting
import numpy as np

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import Adjacency, EpsilonBounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import hashable
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.facts import BudgetExposure, Claim, Generator
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.mechanisms.feature_scaling import Scalings, Unscaled
from tff_pdp.privacy.mechanisms.silo_statistics import NumExamples, PublicNumber
from tff_pdp.privacy.plans.extension import EarlierRounds, with_budgets
from tff_pdp.privacy.plans.search import Search
from tff_pdp.privacy.synthetic.silo_data import SyntheticData
from tff_pdp.settings import Count, Name, Settings

if TYPE_CHECKING:
    from tff_pdp.algorithms.auto_prox.estimates import SiloParameters
    from tff_pdp.algorithms.base import Algorithm, GradientEstimator
    from tff_pdp.models.base import Model
    from tff_pdp.privacy.mechanisms.user_noise import UserSum

# Releases of a scope before training, once each, and their purposes.
FixedEvents = tuple[tuple[dp_accounting.DpEvent, str], ...]
# Values of `training.weighting` for which silos count by their budgets.
BY_BUDGET = ("budget", "budget_softmax")
# The reason in the ledger.
DRAWN_NOISE = "noise on a grid in place of ideal Gaussians"
# Noise this many times as long as the longest mean there can be leaves little to learn from one step or round.
MOST_NOISE_TO_SIGNAL = 10.0
# How often planned rounds may be drawn: they are drawn anew where the same bits cannot be reproduced.
_TIMES_DRAWN = 2


class PlanSettings(Settings):
    """The settings of a privacy plan.

    Attributes:
      kind: the plan. `silo_example` protects each example of a silo, inside the silo. `contact_graph` protects people,
        or pairs of people, of a contact graph, inside their silo. `user` protects each client as a whole, from what the
        server releases. `none` protects nothing, for comparison. `module:name` is a plan from another package.
      batch_size: expected size of a silo's Poisson batch; for users, the size of a batch, because users' batches are
        not sampled.
      feature_scaling: source of the features' shifts and scales.
      generator: generator of random bits inside computations: `philox` is fast but not cryptographic, so claims are
        conditional on it; `chacha20` is cryptographic.
      registry: absolute path of the registry folder, in which all runs on the same records are counted, wherever the
        runs are stored. Default: `tff_pdp/registry` in `$XDG_STATE_HOME`, or in `~/.local/state`.
    """

    kind: Name
    batch_size: Count
    feature_scaling: Scalings = Unscaled()
    generator: Generator = "philox"
    registry: str | None = None

    # Whether clients are users, of whom some take part in a round.
    are_users: ClassVar[bool] = False
    is_private: ClassVar[bool] = True
    # Set for silos alone; elsewhere as by default.
    num_examples: ClassVar[NumExamples] = PublicNumber()
    sampler: ClassVar[str] = "poisson"
    selection_loss_bound: ClassVar[float] = 0.1
    synthetic: ClassVar[SyntheticData | None] = None

    def __post_init__(self):
        if self.registry is not None and not Path(self.registry).is_absolute():
            raise ValueError(
                f"registry {self.registry!r} must be an absolute path: a relative path is another folder in each "
                "working directory"
            )

    def check(self, algorithm: "Algorithm", weighting: str) -> None:
        """Checks that the plan allows a method and a weighting: by default, that both are for silos.

        Raises:
          ConfigError: the plan does not allow the method or the weighting.
        """
        if algorithm.adapt is not None:
            raise ConfigError(
                f"algorithms.{algorithm.name} adapts models to a client's examples without noise, which does not "
                "protect a silo's examples: it is for users (privacy.kind user, or none with unit user)"
            )
        if algorithm.needs_plain_gradients and self.is_private and self.synthetic is None:
            raise ConfigError(
                f"algorithms.{algorithm.name} differentiates gradients, and privacy.kind {self.kind} clips and noises "
                "them: choose an order that needs only gradients, or privacy.kind none"
            )
        if weighting == "paper_capped_num_examples":
            raise ConfigError(
                f"training.weighting {weighting!r} is for users; for silos use uniform, num_examples, budget or "
                "budget_softmax"
            )
        by_budget = weighting in BY_BUDGET
        if by_budget and algorithm.released and set(algorithm.released.values()) == {"rows"}:
            raise ConfigError(
                f"training.weighting {weighting!r} has no effect on algorithms.{algorithm.name}, whose server receives "
                "each silo's values as a row of its own: use uniform"
            )
        if by_budget and getattr(self, "budgets", None) is None:
            raise ConfigError(
                f"training.weighting {weighting!r} needs privacy.budgets, and privacy.kind {self.kind} has none"
            )

    @property
    def why_it_ends(self) -> str:
        """The reason why a run cannot go on after its planned rounds, as a clause; empty if a run can."""
        return f"privacy.kind {self.kind} calibrates its noise once, for a planned number of rounds"

    def check_rows(self, row_influence: RowInfluence | None) -> None:
        """Checks that the plan protects the people, or the examples, that a data set's rows are made from.

        Raises:
          ConfigError: the plan protects something else; the message names the plan that does.
          DataError: the data set's `row_influence` is not valid.
        """
        if row_influence is not None:
            raise ConfigError(
                f"privacy.kind {self.kind} is for examples that are independent. The examples of this data set are "
                f"rows made of a contact graph, and one {row_influence.unit} is in up to {row_influence.num_rows} of "
                "them: to protect single rows would not protect people. Set privacy.kind to contact_graph"
            )

    def build(self, training: "PlannedTraining") -> "PrivacyPlan":
        """Builds the plan.

        Raises:
          ConfigError: a setting does not suit the training.
          BudgetError: a budget cannot be met.
        """
        raise NotImplementedError

    def budgets_of(self, client_ids: Sequence[str]) -> dict[str, SiloBudget]:
        """Returns every silo's budget by client id; empty where silos have none."""
        budgets: Any = None if self.are_users else getattr(self, "budgets", None)
        return {} if budgets is None else budgets.assign(client_ids)

    def calibrated_budgets(self, client_ids: Sequence[str]) -> dict[str, SiloBudget]:
        """Returns the budget that every silo's noise is calibrated to, by client id; empty where silos have none."""
        budgets: Any = None if self.are_users else getattr(self, "budgets", None)
        return {} if budgets is None else budgets.calibrated_to(self.budgets_of(client_ids))

    def fit_budget(self, epsilon: float | None, delta: float | None) -> SiloBudget | None:
        """Returns the budget for fitting each new silo; None if the plan does not protect the silo's examples.

        Raises:
          ConfigError: a budget is missing, or out of range; or the plan allows no new clients.
        """
        return None


@dataclasses.dataclass(frozen=True)
class PlannedTraining:
    """The facts about a training, known before it starts, from which a plan is built.

    Attributes:
      num_examples: number n_k of training examples by client id, public or released with noise.
      gradients_per_round: by client id, number of gradient computations on local data in one round.
      rounds: number of planned rounds.
      selection_rounds: number of rounds, from the first, in which clients select a cluster.
      fixed_events: by client id, releases before training, which have to fit into the budget as well.
      num_examples_are_noised: whether the n_k were released with noise, by events of `fixed_events`.
      unsound: reason why nothing is claimed, whatever the ledger says; empty if there is none.
      condition: condition under which the method's guarantee holds; empty if there is none.
      num_parameters: number of weights of the model; the noise on silos' gradients covers all weights.
      num_released: number of values that a client releases in a round.
      num_noised: number of released values to which noise is added; None for all.
      noise_on_own_support: whether clients add shares of the noise themselves, each client only to nonzero values of
        the client's own release.
      total_weight: sum of the weights of all clients, if weights are capped at 1; otherwise None.
      search: each silo's further runs, with equal noise, to choose hyper-parameters; None without a search.
      synthetic_rounds: number of rounds, from the first, that train on synthetic data alone and release nothing new.
      row_influence: for rows of a contact graph, the protected unit and a bound on the number of rows that one unit
        changes; None for independent examples.
      earlier: rounds that a run had made before further rounds were planned; None for a training from the start.
    """

    num_examples: Mapping[str, int]
    gradients_per_round: Mapping[str, int]
    rounds: int
    selection_rounds: int = 0
    fixed_events: Mapping[str, FixedEvents] = dataclasses.field(default_factory=dict)
    num_examples_are_noised: bool = False
    unsound: str = ""
    condition: str = ""
    num_parameters: int = 0
    num_released: int = 0
    num_noised: int | None = None
    noise_on_own_support: bool = False
    total_weight: float | None = None
    search: Search | None = None
    synthetic_rounds: int = 0
    row_influence: RowInfluence | None = None
    earlier: EarlierRounds | None = None

    @property
    def free_rounds(self) -> int:
        """Number of rounds, from the first, that read no client's own data, or that were made and paid for before."""
        return max(self.synthetic_rounds, self.earlier.rounds if self.earlier else 0)

    @property
    def paid_rounds(self) -> int:
        """Number of rounds that read clients' own data, and that are yet to be made."""
        return self.rounds - self.free_rounds

    def released_before(self, scope: str) -> list[dp_accounting.DpEvent]:
        """Lists a scope's releases outside of the rounds that are yet to be made."""
        if self.earlier is not None:
            return self.earlier.events(scope)
        return [event for event, _ in self.fixed_events.get(scope, ())]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyPlan(abc.ABC):
    """The protection of one training: its unit, adjacency, mechanism, claim and cost.

    A plan has scopes, each with its own budget and ledger entries. If silos' examples are protected, each silo is a
    scope; if users are protected, all users together are one scope.

    Attributes:
      unit: the unit of protection.
      adjacency: how neighbouring data sets differ.
      claim: strength of the guarantee.
      claim_reason: one line that says why the claim is no weaker and no stronger.
      budgets: budget of each scope; empty without privacy.
      rounds: planned number of rounds, for which the noise was calibrated.
      fixed_events: by scope, releases before training.
      drawn_noise: by scope, the event that charges for the difference between drawn and ideal Gaussian noise; see
        `drawn_noise_event`.
      generator: generator of random bits in computations: batches, noise and selections.
      num_examples_are_noised: whether silos' numbers of examples were released with noise; otherwise they are public.
      search: each silo's further runs to choose hyper-parameters; None without a search.
      row_influence: the protected unit of rows made of a contact graph, and S, the largest number of rows that change
        with one unit; None where examples are independent.
      earlier: rounds that a run had made before the plan's further rounds; None for a training from the start.
    """

    # Whether clients are users, of whom some take part in a round; their states lie in a store, their data come by
    # cohorts.
    samples_clients: ClassVar[bool] = False

    unit: str
    adjacency: Adjacency
    claim: Claim
    claim_reason: str
    budgets: Mapping[str, SiloBudget]
    rounds: int
    fixed_events: Mapping[str, FixedEvents] = dataclasses.field(default_factory=dict)
    drawn_noise: Mapping[str, GridNoiseDpEvent] = dataclasses.field(default_factory=dict)
    generator: Generator = "philox"
    num_examples_are_noised: bool = False
    search: Search | None = None
    row_influence: RowInfluence | None = None
    earlier: EarlierRounds | None = None

    @abc.abstractmethod
    def estimator(self, model: "Model") -> "GradientEstimator":
        """Builds the estimator of a model's gradients on clients' data."""

    def server_sum(self) -> "UserSum | None":
        """Describes the server's sum of clients' releases; None where the server computes plain means and sums."""
        return None

    def start(self, server_state: Any, seeds: np.ndarray) -> Any:
        """Returns the server's first state; if the server adds noise, the state holds this plan's mechanism.

        Args:
          server_state: state of a newly initialized process.
          seeds: int64 `[2, 2]`, secret, used in this run alone.
        """
        return server_state

    def check_redrawn(self, round_number: int) -> None:
        """Checks that all rounds after a given round can be repeated with new random draws.

        Raises:
          ConfigError: later rounds depend on the noise of the given round or of earlier rounds.
        """
        del round_number

    def round_of_nobody(self, process: Any, server_state: Any) -> Any:
        """Returns the server's state after a round without clients; `process` is a `PersonalizedProcess`."""
        return server_state

    @abc.abstractmethod
    def scope_of(self, client_id: str) -> str:
        """Returns the scope that a client's data belong to."""

    @abc.abstractmethod
    def cohort(
        self, round_number: int, client_ids: Sequence[str], generator: Callable[[int], ExactDraws]
    ) -> np.ndarray:
        """Draws the clients of a round: their positions in `client_ids`, int64, ascending.

        Args:
          round_number: number of the round, from 1.
          client_ids: all clients.
          generator: function that maps each whole number to draws with a separate secret key.
        """

    def client_mechanism(self, client_ids: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Returns the parameters of clients' gradient estimators by name, `[clients]` each."""
        return {}

    def release_values(self, *, is_weighted: bool) -> dict[str, float]:
        """Returns the parameters of clients' releases by name, equal for all clients."""
        return {}

    @abc.abstractmethod
    def weights(
        self, amounts: Mapping[str, float], client_ids: Sequence[str], cap: int, round_number: int
    ) -> np.ndarray:
        """Returns clients' weights in a mean: float64 `[clients]`.

        Args:
          amounts: by client id, the number that the weight is computed from: the client's number of examples, public or
            noised, or epsilon of the client's budget.
          client_ids: clients whose weights are returned.
          cap: number of examples from which on a user has weight 1.
          round_number: number of the round, from 1.
        """

    def claim_of(self, client_id: str) -> tuple[Claim, str]:
        """Returns the claim for one client and its reason; claims may differ between clients."""
        return self.claim, self.claim_reason

    def budget_exposure(self, *, has_releases: bool) -> BudgetExposure:
        """Returns who can read the budgets of a method; `has_releases` says whether the method's clients upload.

        A silo's uploads show the silo's noise, hence z and epsilon. Users have one budget, which is public.
        """
        if self.samples_clients or not self.budgets:
            return "public" if self.budgets else "none"
        return "inferable" if has_releases else "none"

    def clients_without_noise(self) -> list[str]:
        """Lists clients without noise, because their budgets are infinite; empty if the plan claims nothing."""
        return []

    def public_parameters(self, hparams: Mapping[str, np.ndarray]) -> "SiloParameters":
        """Returns all silos' public parameters, from which a method builds its `hook` (`algorithms.base`).

        Raises:
          ConfigError: clients are not silos, or a silo leaves before the last round.
        """
        raise ConfigError("prox_weight: auto needs silos, whose models are released: give prox_weight a number")

    def selection_epsilon(self, client_id: str, round_number: int) -> float:
        """Returns epsilon of a client's cluster selection in a round: 0 without a selection, infinite without noise."""
        return 0.0

    @property
    def warning(self) -> str:
        """A warning about the plan before training; empty where there is none."""
        return ""

    @abc.abstractmethod
    def charges(self, scope: str, round_number: int) -> Sequence[tuple[dp_accounting.DpEvent, int, str]]:
        """Lists a scope's releases in a round, as (event, count, purpose)."""

    @abc.abstractmethod
    def training_counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """Counts every release about a scope in one whole training, by event."""

    def planned_counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """Counts every planned release about a scope, by event, without the fixed events."""
        return self.training_counts(scope)

    def all_counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """Counts all of a scope's releases by event: planned releases, fixed events and the charge for drawn noise."""
        if self.earlier is not None:
            counts = self.earlier.counts(scope)
        else:
            counts = Counter(hashable(event) for event, _ in self.fixed_events.get(scope, ()))
        if scope in self.drawn_noise:
            counts[self.drawn_noise[scope]] += 1
        counts.update(self.planned_counts(scope))
        return counts

    def charge_search(self, ledger: Ledger) -> None:
        """Records every silo's search, and the rounds of the pivot run, in the ledger before any run begins.

        Raises:
          BudgetError: a silo would overspend.
          ConfigError: the plan has no search.
        """
        raise ConfigError("tuning.search is for privacy.kind silo_example")

    def planned_epsilon(self) -> float:
        """Bounds epsilon of a whole planned training by the largest bound of a scope; infinite without privacy."""
        ledger = self.build_ledger()
        if ledger is None:
            return math.inf
        for scope in self.budgets:
            ledger.append(scope, self.training_event(scope))
        return max(bounds.best for bounds in ledger.epsilons().values())

    def client_facts(self, client_id: str) -> dict[str, Any]:
        """Returns facts of one client's mechanism for reports, by name; empty where all clients have the same facts."""
        return {}

    @property
    def noise_facts(self) -> dict[str, float]:
        """Facts of the noise for tables of results, by name; empty where noise differs between clients."""
        return {}

    def build_ledger(self) -> Ledger | None:
        """Builds a ledger with the plan's budgets and all releases before training; None without budgets.

        If a run goes on after its end, the ledger has all releases of the earlier rounds, and the charge for the drawn
        noise of the further rounds.

        Raises:
          BudgetError: the planned rounds would overspend a budget.
        """
        if not self.budgets:
            return None
        if self.earlier is not None and self.earlier.ledger is not None:
            ledger = with_budgets(self.earlier.ledger, self.budgets)
            for scope, event in self.drawn_noise.items():
                ledger.append(scope, event, 1, DRAWN_NOISE)
            self.precheck_rest(ledger)
            return ledger
        ledger = Ledger(self.unit, self.adjacency, self.budgets)
        self.precheck_rest(ledger)
        for scope in self.budgets:
            for event, reason in self.fixed_events.get(scope, ()):
                ledger.append(scope, event, 1, reason)
        self.charge_drawn_noise(ledger)
        return ledger

    def charge_drawn_noise(self, ledger: Ledger) -> None:
        """Charges scopes for the distance between drawn and ideal noise, unless the ledger has the charge already.

        Raises:
          BudgetError: a scope would overspend.
        """
        # The ledger of further rounds begins with their charge: `build_ledger`.
        charged = {entry.scope for entry in ledger.entries if isinstance(entry.event, GridNoiseDpEvent)}
        for scope, event in self.drawn_noise.items():
            if scope not in charged and scope in ledger.budgets:
                ledger.append(scope, event, 1, DRAWN_NOISE)

    def with_noise_drawn_anew(self, ledger: Ledger | None, attempt: int) -> Ledger | None:
        """Returns a ledger that covers rounds with new draws: `ledger`, or a copy with one more charge for drawn noise.

        Args:
          ledger: the spending so far.
          attempt: number of times that rounds will have been repeated with new draws.

        Raises:
          BudgetError: a scope would overspend.
        """
        if ledger is None or 1 + attempt <= _TIMES_DRAWN:
            return ledger
        ledger = copy.deepcopy(ledger)
        for scope, event in self.drawn_noise.items():
            if scope in ledger.budgets:
                ledger.append(scope, GridNoiseDpEvent(-(-event.values // _TIMES_DRAWN)), 1, DRAWN_NOISE)
        return ledger

    def precheck_rest(self, ledger: Ledger) -> None:
        """Checks that all planned releases still to come fit into the budgets, so that recording them takes no time.

        Raises:
          BudgetError: the releases do not fit.
        """
        recorded: Counter[tuple[str, dp_accounting.DpEvent]] = Counter()
        for entry in ledger.entries:
            recorded[entry.scope, entry.event] += entry.count
        for scope in self.budgets:
            # All together: each event alone may fit where their sum does not.
            planned = self.all_counts(scope).items()
            ledger.precheck(scope, {event: max(0, count - recorded[scope, event]) for event, count in planned})

    def guaranteed_epsilon(self, ledger: Ledger, client_id: str) -> EpsilonBounds:
        """Returns the epsilon that may be claimed for a client's releases: the spent epsilon."""
        return ledger.epsilon(self.scope_of(client_id))

    def training_event(self, scope: str) -> dp_accounting.DpEvent:
        """Builds the event of all of a scope's releases in one whole training."""
        return dp_accounting.ComposedDpEvent(
            [dp_accounting.SelfComposedDpEvent(event, count) for event, count in self.training_counts(scope).items()]
        )

    def charge_round(self, ledger: Ledger, round_number: int) -> None:
        """Records one round's releases in the ledger, before the round runs, for every scope with a release.

        Raises:
          BudgetError: a scope would overspend, or the plan has no such round; nothing of the round is recorded.
        """
        if not 1 <= round_number <= self.rounds:
            raise BudgetError(
                f"Round {round_number} would overspend: the plan, and its noise, are for {self.rounds} rounds. "
                "The step was not run."
            )
        charges = {scope: self.charges(scope, round_number) for scope in self.budgets}
        for scope, events in charges.items():
            if events:
                ledger.precheck(scope, {event: count for event, count, _ in events})
        self.charge_drawn_noise(ledger)
        for scope, events in charges.items():
            for event, count, reason in events:
                ledger.append(scope, event, count, reason)


def drawn_noise_event(values: int) -> GridNoiseDpEvent:
    """Builds the event that charges twice for `values` values of noise, as rounds may be repeated with new draws."""
    return GridNoiseDpEvent(int(_TIMES_DRAWN * values))
