"""Protects each user as a whole: settings, plan and builder of user-level DP.

The server is trusted with users' single updates, and releases noised sums of updates.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    calibrate_noise_multiplier,
    next_float32,
    poisson_gaussian_event,
    solve_noise_multiplier,
)
from tff_pdp.privacy.accounting.budgets import OneForAll, SiloBudget
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.facts import UserCosts, UserSums, generator_condition
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.mechanisms.feature_scaling import ScalingsWithoutRelease, Unscaled
from tff_pdp.privacy.mechanisms.parameters import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM, UserMechanism
from tff_pdp.privacy.mechanisms.user_noise import (
    AdaptiveClip,
    FixedClip,
    TreeNoise,
    UserNoise,
    UserSum,
    rounds_per_epoch,
)
from tff_pdp.privacy.plans.plan import (
    BY_BUDGET,
    MOST_NOISE_TO_SIGNAL,
    Claim,
    PlannedTraining,
    PlanSettings,
    PrivacyPlan,
    drawn_noise_event,
)
from tff_pdp.settings import Count, Positive

if TYPE_CHECKING:
    import tensorflow_privacy

    from tff_pdp.algorithms.base import Algorithm, GradientEstimator
    from tff_pdp.models.base import Model

# The one scope of a user-level ledger.
USERS = "all users"
# The reason in the ledger.
UPDATES = "noised sums of users' updates"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPlan(PrivacyPlan):
    """Protects one user: all examples, and all rounds that the user takes part in.

    Guarantee: with claim `formal` or `formal-conditional`, everything that the server releases, the shared model of
      every round included, is (epsilon, delta)-DP for any one user; the ledger built here bounds epsilon. Results
      computed from releases and one user's own data, such as that user's personal model, are (epsilon, delta)-DP for
      all other users (joint DP), but not for that user.
    Assumes: the server is trusted with users' clipped updates and participation; the conditions in `claim_reason` hold.

    Attributes:
      batch_size: number of examples in a user's batches, which are consecutive, not sampled.
      mechanism: public parameters of the noised sums.
      noise: kind of noise and clip.
      num_users: N, the size of the population, for which the sampling rate was set.
      is_constant: whether N is a public constant; otherwise it is the number of users in the data.
      num_released: number of values that a user releases in a round.
      num_noised: number of these values that the noise changes.
      noise_on_own_support: whether users add shares of the noise themselves, each only where the user's own update is
        not zero, as a paper does; this protects nobody.
    """

    samples_clients: ClassVar[bool] = True

    batch_size: int
    mechanism: UserMechanism
    noise: UserNoise = dataclasses.field(default_factory=FixedClip)
    num_users: int
    is_constant: bool
    num_released: int
    num_noised: int
    noise_on_own_support: bool = False

    def estimator(self, model: "Model") -> "GradientEstimator":
        """Builds the estimator of plain gradients of batches: noise is added to users' releases instead."""
        from tff_pdp.algorithms.minibatch import build_minibatch

        return build_minibatch(model, self.batch_size)

    def server_sum(self) -> UserSum:
        """Describes the server's sum of users' releases."""
        return UserSum(self.noise, self.mechanism.sampling_rate, self.generator)

    def start(self, server_state: Any, seeds: np.ndarray) -> Any:
        """Returns the server's first state, with clip norm, noise and expected cohort in it."""
        if not self.num_released:
            return server_state
        aggregation = server_state["aggregation"]
        started = aggregation["sum"]._replace(query_state=self.build_query(seeds).initial_global_state())
        cohort = np.float32(self.mechanism.expected_cohort)
        return {**server_state, "aggregation": {"sum": started, "cohort": cohort}}

    def check_redrawn(self, round_number: int) -> None:
        """Checks that rounds after the given one depend neither on noise nor on the clip norm of earlier rounds."""
        if not self.num_released or isinstance(self.noise, FixedClip):
            return
        if isinstance(self.noise, TreeNoise) and not round_number % rounds_per_epoch(self.mechanism.sampling_rate):
            return
        raise ConfigError(
            f"rounds after round {round_number} cannot be repeated with new draws: they depend on noise or clip norm "
            "of earlier rounds. This run was started on another processor, with another version of this project, or "
            "with other versions or settings of TensorFlow: resume the run there, or use --overwrite to start again"
        )

    def round_of_nobody(self, process: Any, server_state: Any) -> Any:
        """Returns the server's state after a round without users, which is noised like any other."""
        return process.next_of_nobody(server_state, [], [], [])

    def release_values(self, *, is_weighted: bool) -> dict[str, float]:
        """Returns the clip norm, if users clip updates, and a user's share of the noise, if users add noise."""
        if not (is_weighted or self.noise_on_own_support):
            return {}
        clip_norm = {"clip_norm": self.mechanism.clip_norm}
        return {**clip_norm, "noise_share": self.noise_share} if self.noise_on_own_support else clip_norm

    def weights(
        self, amounts: Mapping[str, float], client_ids: Sequence[str], cap: int, round_number: int
    ) -> np.ndarray:
        """Returns users' weights: number of examples divided by `cap`, but at most 1."""
        return capped_weights(np.array([amounts[client_id] for client_id in client_ids], np.float64), cap)

    def planned_epsilon(self) -> float:
        """Bounds epsilon of a whole planned training; zero where nothing is released."""
        return super().planned_epsilon() if self.num_released else 0.0

    def costs(self, epsilons: Mapping[str, float]) -> UserCosts:
        """Returns the training's cost to every user; `epsilons` maps the other field names of `UserCosts` to values."""
        return UserCosts(
            noise_multiplier=self.mechanism.noise_multiplier,
            num_noised=self.num_noised,
            noise_to_signal=self.noise_to_signal,
            **epsilons,
        )

    def sums(self, *, weight_cap: int | None, own_support: tuple[str, ...]) -> UserSums:
        """Describes sampling, clipping, summation and noise of releases; arguments as in the fields of `UserSums`."""
        mechanism, noise = self.mechanism, self.noise
        is_adaptive = isinstance(noise, AdaptiveClip)
        return UserSums(
            rounds=self.rounds,
            num_users=self.num_users,
            is_constant=self.is_constant,
            sampling_rate=mechanism.sampling_rate,
            expected_cohort=mechanism.expected_cohort,
            clip_norm=mechanism.clip_norm,
            noise_multiplier=mechanism.noise_multiplier,
            quantile=noise.quantile if is_adaptive else None,
            count_stddev=noise.count_stddev * mechanism.expected_cohort if is_adaptive else None,
            sum_noise_multiplier=noise.sum_noise_multiplier(mechanism) if is_adaptive else None,
            rounds_per_tree=rounds_per_epoch(mechanism.sampling_rate) if isinstance(noise, TreeNoise) else None,
            weight_cap=weight_cap,
            own_support=own_support,
        )

    @property
    def noise_facts(self) -> dict[str, float]:
        """Facts of the noise for tables of results, by name."""
        return {"noise_multiplier": self.mechanism.noise_multiplier, "noise_to_signal": self.noise_to_signal}

    def scope_of(self, client_id: str) -> str:
        """Returns the scope of all users together: a release may be about any user."""
        return USERS

    def cohort(
        self, round_number: int, client_ids: Sequence[str], generator: Callable[[int], ExactDraws]
    ) -> np.ndarray:
        """Draws every user independently with the sampling rate or, with trees, once in an epoch.

        The cohort may be empty. Each user's probability is exactly the float64 sampling rate. Without trees, the time
        of a draw grows with the cohort, not with the number of users.
        """
        if not self.num_released:
            # Nothing leaves anyone, so there is nothing to hide in a cohort.
            return np.arange(len(client_ids))
        if isinstance(self.noise, TreeNoise):
            epoch, number = divmod(round_number - 1, rounds_per_epoch(self.mechanism.sampling_rate))
            order = generator(epoch).permutation(len(client_ids))
            size = math.ceil(len(client_ids) / rounds_per_epoch(self.mechanism.sampling_rate))
            return np.sort(order[number * size : (number + 1) * size])
        return generator(round_number).heads(len(client_ids), self.mechanism.sampling_rate)

    def training_counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """Returns the number of noised sums, one in each round; with trees, the number of trees, one in each epoch."""
        if not isinstance(self.noise, TreeNoise):
            return Counter({event: self.rounds for event, _, _ in self.charges(scope, 1)})
        counts: Counter[dp_accounting.DpEvent] = Counter()
        for round_number in range(1, self.rounds + 1):
            counts.update({event: count for event, count, _ in self.charges(scope, round_number)})
        return counts

    def charges(self, scope: str, round_number: int) -> list[tuple[dp_accounting.DpEvent, int, str]]:
        """Lists the round's noised sum; with trees, the whole tree in an epoch's first round, otherwise nothing."""
        if not self.num_released:
            return []
        noise_multiplier, sampling_rate = self.mechanism.noise_multiplier, self.mechanism.sampling_rate
        if not isinstance(self.noise, TreeNoise):
            return [(poisson_gaussian_event(sampling_rate, noise_multiplier, 1), 1, UPDATES)]
        length = rounds_per_epoch(sampling_rate)
        if (round_number - 1) % length:
            return []
        # One tree's noised running sums, over rounds in which no user takes part twice.
        steps = min(length, self.rounds - round_number + 1)
        event = dp_event.SingleEpochTreeAggregationDpEvent(float(noise_multiplier), int(steps))
        return [(event if noise_multiplier else dp_accounting.NonPrivateDpEvent(), 1, UPDATES)]

    def build_query(self, seeds: Any) -> "tensorflow_privacy.DPQuery":
        """Builds the query of the server's sums, including the initial state; `seeds`, int64 `[2, 2]`, are secret."""
        from tff_pdp.privacy.mechanisms.user_queries import build_query

        mechanism = self.mechanism
        if self.noise_on_own_support:
            # Shares of the noise arrive in the records, which are clipped already.
            mechanism = dataclasses.replace(mechanism, clip_norm=math.inf, noise_multiplier=0.0)
        return build_query(self.noise, self.num_released, mechanism, seeds, self.generator)

    @property
    def noise_share(self) -> float:
        """Standard deviation of a user's noise share; shares of a cohort of expected size add up to a sum's noise."""
        mechanism = self.mechanism
        if mechanism.noise_multiplier == 0:
            return 0.0
        return mechanism.noise_multiplier * mechanism.clip_norm / math.sqrt(mechanism.expected_cohort)

    @property
    def noise_to_signal(self) -> float:
        """Expected norm of noise on a round's mean (with trees: of one node), in clip norms: z sqrt(d) / qN."""
        noise_multiplier = self.noise.sum_noise_multiplier(self.mechanism)
        return noise_multiplier * math.sqrt(self.num_noised) / self.mechanism.expected_cohort

    @property
    def warning(self) -> str:
        """A warning about the noise before training; empty where there is none."""
        ratio = self.noise_to_signal
        if ratio <= MOST_NOISE_TO_SIGNAL:
            return ""
        users = math.ceil(self.num_users * ratio / MOST_NOISE_TO_SIGNAL)
        noise_multiplier = self.noise.sum_noise_multiplier(self.mechanism)
        return (
            f"The noise on a round's mean is about {ratio:.3g} times as long as the longest mean there can be "
            f"(z sqrt(d) / qN, with z = {noise_multiplier:.3g}, d = {self.num_noised:,} values, "
            f"qN = {self.mechanism.expected_cohort:g} users): little will be learnt. With the same budget, sampling "
            f"rate and rounds it takes some {users:,} users to bring that down to {MOST_NOISE_TO_SIGNAL:g}; or share "
            "fewer values, plan fewer rounds, or raise epsilon."
        )


def capped_weights(sizes: np.ndarray, cap: int) -> np.ndarray:
    """Returns each client's number of examples divided by `cap`, but at most 1: float64 `[clients]`."""
    return np.minimum(sizes / cap, 1.0)


class User(PlanSettings):
    """Protects each client as a whole, from what the server releases.

    Attributes:
      users_per_round: expected number of users in a round.
      num_users: N, the size of the population, a public constant; by default the number of clients in the data, which
        is then treated as public.
      clip_norm: C, L2 bound on all that a user releases in a round.
      budgets: epsilon and delta for all users.
      user_noise: clipping and noise of the sums of updates.
    """

    budgets: OneForAll
    users_per_round: Positive
    num_users: Count | None = None
    clip_norm: Annotated[float, Meta(ge=SMALLEST_CLIP_NORM, le=LARGEST_CLIP_NORM)] = 1.0
    user_noise: UserNoise = FixedClip()
    feature_scaling: ScalingsWithoutRelease = Unscaled()

    are_users: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if math.isinf(self.budgets.epsilon):
            raise ValueError("budgets.epsilon is infinite; for no privacy, set kind to none and unit to user")

    def check(self, algorithm: "Algorithm", weighting: str) -> None:
        """Checks that a method and a weighting are for users."""
        check_for_users(algorithm, weighting)

    def build(self, training: PlannedTraining) -> UserPlan:
        """Builds cohorts, clip and noise, calibrated to one budget for all users.

        Raises:
          ConfigError: a parameter is out of range, or training releases what a user-level plan does not cover.
          BudgetError: the budget cannot be met.
        """
        plan = user_plan_without_noise(self, training)
        budget = self.budgets.assign([USERS])[USERS]
        if budget.delta >= 1 / plan.num_users:
            raise ConfigError(
                f"privacy.budgets: delta {budget.delta:g} is not below 1 / {plan.num_users}, the number of users: "
                "with that delta, publishing one random user's data in the clear would count as private; lower delta"
            )
        if training.num_released and not training.noise_on_own_support:
            plan = dataclasses.replace(plan, drawn_noise={USERS: _drawn_noise(plan, training)})
        noise_multiplier = next_float32(_noise_multiplier(plan, budget)) if training.num_released else 0.0
        mechanism = dataclasses.replace(plan.mechanism, clip_norm=self.clip_norm, noise_multiplier=noise_multiplier)
        if isinstance(plan.noise, AdaptiveClip):
            plan.noise.sum_noise_multiplier(mechanism)
        claim, reason = _claim(self, training)
        return dataclasses.replace(plan, claim=claim, claim_reason=reason, budgets={USERS: budget}, mechanism=mechanism)


def check_for_users(algorithm: "Algorithm", weighting: str) -> None:
    """Checks that a method and a weighting are for users.

    Raises:
      ConfigError: the method or the weighting is for silos.
    """
    if set(algorithm.released.values()) - {"mean"} or algorithm.candidates is not None:
        raise ConfigError(
            f"algorithms.{algorithm.name} selects clusters or releases values of single clients: it is for silos"
        )
    if algorithm.public:
        raise ConfigError(
            f"algorithms.{algorithm.name} tells the server the mean of {', '.join(algorithm.public)} over a round's "
            "clients. Users' numbers of examples, and who takes part, are private: the method is for silos"
        )
    if algorithm.needs_everyone:
        raise ConfigError(
            f"algorithms.{algorithm.name} needs every client in every round: it is for silos. Methods for users share "
            "a part of the model, or tune it before it is used, such as centaur, udp_hypernet and dp_fed_avg_ft"
        )
    if weighting in ("num_examples", *BY_BUDGET):
        raise ConfigError(
            f"training.weighting {weighting} is for silos: for users use uniform or paper_capped_num_examples"
        )


def user_plan_without_noise(settings: Any, training: PlannedTraining) -> UserPlan:
    """Builds a user-level plan that has cohorts but no clip and no noise.

    Args:
      settings: settings that determine the cohorts and the kind of noise.
      training: the users' releases, and how often each is made.

    Raises:
      ConfigError: a parameter does not suit the training.
    """
    if training.search is not None:
        raise ConfigError("tuning.search is for privacy.kind silo_example")
    if any(training.fixed_events.values()):
        raise ConfigError("privacy.feature_scaling may release nothing of single users: use none or public forms")
    noise: UserNoise = settings.user_noise
    population = len(training.num_examples) if settings.num_users is None else settings.num_users
    if settings.users_per_round > population:
        raise ConfigError(
            f"privacy.users_per_round must be at most {population}, the number of users, not "
            f"{settings.users_per_round!r}"
        )
    if not isinstance(noise, FixedClip) and (training.noise_on_own_support or training.total_weight is not None):
        raise ConfigError(
            "privacy.user_noise: use kind fixed_clip; with this method or weighting each user clips its own update"
        )
    # Cohorts are drawn with the float64 that is accounted for.
    sampling_rate = settings.users_per_round / population
    is_tree = isinstance(noise, TreeNoise)
    weight = population if training.total_weight is None else training.total_weight
    if is_tree:
        # An epoch has whole rounds, so that cohorts may be smaller than asked for.
        sampling_rate = 1 / rounds_per_epoch(sampling_rate)
    return UserPlan(
        unit="user",
        adjacency=Adjacency.REPLACE_SPECIAL if is_tree else Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="privacy is switched off: no clipping, no noise",
        budgets={},
        rounds=training.rounds,
        batch_size=settings.batch_size,
        mechanism=UserMechanism(math.inf, 0.0, sampling_rate, weight * sampling_rate),
        noise=noise,
        num_users=population,
        is_constant=settings.num_users is not None,
        num_released=training.num_released,
        num_noised=training.num_released if training.num_noised is None else training.num_noised,
        noise_on_own_support=training.noise_on_own_support,
        generator=settings.generator,
    )


def _noise_multiplier(plan: UserPlan, budget: SiloBudget) -> float:
    if not isinstance(plan.noise, TreeNoise):
        return calibrate_noise_multiplier(
            budget.epsilon, budget.delta, plan.mechanism.sampling_rate, plan.rounds, list(plan.drawn_noise.values())
        )

    def event(noise_multiplier: float) -> dp_accounting.DpEvent:
        mechanism = dataclasses.replace(plan.mechanism, noise_multiplier=noise_multiplier)
        training = dataclasses.replace(plan, mechanism=mechanism).training_event(USERS)
        return dp_accounting.ComposedDpEvent([training, *plan.drawn_noise.values()])

    length = rounds_per_epoch(plan.mechanism.sampling_rate)
    height = math.ceil(math.log2(min(length, plan.rounds))) + 1
    releases = height * math.ceil(plan.rounds / length)
    return solve_noise_multiplier(
        event,
        budget.epsilon,
        budget.delta,
        plan.adjacency,
        guess=math.sqrt(2 * releases * math.log(1 / budget.delta)) / budget.epsilon,
    )


def _drawn_noise(plan: UserPlan, training: PlannedTraining) -> GridNoiseDpEvent:
    """Counts the noise of every round's sum and of its count of norms; trees have fewer than two nodes a round.

    Noise is drawn in pairs, the last of which may be for one value.
    """
    sums = 2 if isinstance(plan.noise, TreeNoise) else 1
    return drawn_noise_event((sums * (training.num_released + 1) + 2) * plan.rounds)


def _claim(settings: User, training: PlannedTraining) -> tuple[Claim, str]:
    if training.unsound:
        return "none", training.unsound
    public_number = "the number of users is treated as public" if settings.num_users is None else ""
    of_bits = generator_condition(settings.generator)
    conditions = [condition for condition in (training.condition, public_number, of_bits) if condition]
    if conditions:
        return "formal-conditional", "; ".join(conditions)
    return "formal", (
        "every value that the server releases is a clipped, noised sum over users divided by a public constant; the "
        "server itself is trusted with single updates"
    )
