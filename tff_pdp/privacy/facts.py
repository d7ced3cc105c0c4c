"""Defines the facts of privacy statements: methods' claims, privacy costs of silos or users, and the noise on sums.

Facts are typed and frozen, as settings are; `reports/statement.py` turns facts into sentences. Silos protect a record
or, where records are rows of a contact graph, a person or a pair.
"""

import math
from typing import ClassVar, Literal, get_args

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.settings import Settings

# Why nothing is claimed of a run with training.test_only_seed.
FIXED_SEED = "test mode: all noise follows from a fixed seed, so anyone can subtract it"

# From the strongest to the weakest; the first two are guarantees.
Claim = Literal["formal", "formal-conditional", "empirical", "none"]
CLAIMS: tuple[Claim, ...] = get_args(Claim)
GUARANTEES = CLAIMS[:2]

# Who can read budgets: whoever sees a client's upload (`inferable`), nobody from uploads, since none has noise of a
# budget (`none`), or everybody, since there is one announced budget for all (`public`).
BudgetExposure = Literal["inferable", "public", "none"]

# The generators of random bits inside computations: `tff_pdp.privacy.mechanisms.random_bits`.
Generator = Literal["philox", "chacha20"]
_PHILOX = "random bits are Philox's, which is no cryptographic generator"
_EXAMPLES = "an example's gradient is taken not to depend, to the last bit, on the others in its batch"


def generator_condition(generator: Generator) -> str:
    """Returns the condition that a random generator adds to a guarantee; empty for a cryptographic generator."""
    return _PHILOX if generator == "philox" else ""


def condition_of_examples(generator: Generator) -> str:
    """Returns the conditions, on floating point and random bits, of a guarantee for sums of examples' gradients."""
    return "; ".join(filter(None, [_EXAMPLES, generator_condition(generator)]))


def claim_of_several(claim: str, reason: str) -> tuple[str, str]:
    """Returns the joint claim, and its reason, for a run and other runs on record whose generators are unknown."""
    if claim not in GUARANTEES or _PHILOX in reason:
        return claim, reason
    others = "random bits of other runs on record may be Philox's, which is no cryptographic generator"
    return "formal-conditional", "; ".join(filter(None, [reason.strip().rstrip("."), others]))


class UserCosts(Settings):
    """The cost of one method's training to every user, and its noise compared with the clip norm.

    Attributes:
      epsilon_target: the budget; infinite without privacy.
      epsilon_spent: the smallest bound: `epsilon_rdp`, `epsilon_pld` or, without sampling, the exact bound. Infinite
        for the claim `none`, 0 without a release.
      epsilon_rdp: upper bound from Rényi accounting.
      epsilon_pld: upper bound from privacy loss distributions; NaN where it was not computed.
      delta: the delta of all three epsilons.
      noise_multiplier: z, noise multiplier of one round's whole release or of each node of a tree; 0 without a release.
      num_noised: number of values of a user's release to which noise is added; 0 without a release.
      noise_to_signal: expected norm of the noise on the mean of a round (with trees: of a node), divided by the clip
        norm.
    """

    epsilon_target: float
    epsilon_spent: float
    epsilon_rdp: float
    epsilon_pld: float
    delta: float
    noise_multiplier: float
    num_noised: int
    noise_to_signal: float

    @property
    def is_bare(self) -> bool:
        """True if a release had no noise, so that no epsilon holds."""
        return not self.noise_multiplier and (self.num_noised > 0 or not math.isfinite(self.epsilon_spent))


class MethodFacts(Settings):
    """A method, and the claim for its models.

    Attributes:
      name: name in the registry.
      title: name in reports.
      claim: claim for this run.
      claim_reason: reason for the claim, in one line.
      exported: whether the models were written for serving.
      user_costs: what training cost every user; None where clients are silos.
      budget_exposure: who can read the budgets that training was calibrated to.
    """

    name: str
    title: str
    claim: str
    claim_reason: str
    exported: bool
    user_costs: UserCosts | None = None
    budget_exposure: BudgetExposure = "inferable"


class SiloCosts(Settings):
    """The privacy cost to one silo, and the parameters of its mechanism.

    Attributes:
      id: the silo's name; empty if the statement must not name silos.
      num_train: number of training examples: a public number, or a number released with noise.
      epsilon_target: the silo's budget for one method; infinite where the silo asked for no protection.
      epsilon_spent: largest epsilon of one method's training over the compared methods. A method's epsilon is the
        smallest bound (`epsilon_rdp`, `epsilon_pld` or, without sampling, the exact bound), or the budget if
        `num_train` was noised; infinite if the claim is `none`.
      epsilon_rdp: upper bound from Rényi accounting.
      epsilon_pld: upper bound from privacy loss distributions; NaN where it was not computed.
      delta: the delta of all three epsilons.
      noise_multiplier: standard deviation of the noise divided by the clip norm.
      sampling_rate: probability that one record takes part in one step.
      last_round: last round in which the silo took part, before its budget was spent or training ended.
      claim: claim for this silo; `none` where the silo, or the run, has no guarantee.
      claim_reason: reason for the claim, in one line.
      noise_label: epsilon that an asymptotic formula states for the silo's noise, which is no guarantee; None if the
        noise follows from `epsilon_target`.
    """

    id: str
    num_train: int
    epsilon_target: float
    epsilon_spent: float
    epsilon_rdp: float
    epsilon_pld: float
    delta: float
    noise_multiplier: float
    sampling_rate: float
    last_round: int
    claim: str
    claim_reason: str
    noise_label: float | None = None


class UserSums(Settings):
    """The sampling, clipping, summation and noise of users' releases, equal for all methods of an experiment.

    Attributes:
      rounds: planned number of rounds.
      num_users: N, the size of the population, for which the sampling rate was set.
      is_constant: whether N is a public constant; otherwise N is the number of users in the data, treated as public.
      sampling_rate: q, the probability that a user is in a round's cohort; for trees, the share of users in a cohort.
      expected_cohort: the constant that means are divided by.
      clip_norm: C, L2 bound on all that one user releases in a round; the first bound where the clip norm adapts.
      noise_multiplier: z as in `UserCosts`, for methods with releases.
      quantile: quantile of the norms that the clip norm follows; None where the clip norm is fixed.
      count_stddev: standard deviation of the noise on the number of norms below a clip norm that adapts.
      sum_noise_multiplier: noise multiplier of the sum alone, where the clip norm adapts.
      rounds_per_tree: number of rounds after which a new tree starts; None where every round has separate noise.
      weight_cap: smallest number of examples with which a user has weight 1; None where all users have the same weight.
      own_support: titles of methods whose users add noise themselves, each user only to nonzero values of the user's
        own update.
    """

    rounds: int
    num_users: int
    is_constant: bool
    sampling_rate: float
    expected_cohort: float
    clip_norm: float
    noise_multiplier: float
    quantile: float | None = None
    count_stddev: float | None = None
    sum_noise_multiplier: float | None = None
    rounds_per_tree: int | None = None
    weight_cap: int | None = None
    own_support: tuple[str, ...] = ()

    @property
    def expected_users(self) -> float:
        """Expected number of users in a round."""
        return self.sampling_rate * self.num_users


class RunsOnRecord(Settings):
    """The joint cost of all training runs on record.

    Attributes:
      epsilon: largest epsilon over scopes, from the ledgers; None without a ledger.
      delta: delta of `epsilon`.
      runs: number of runs, replaced runs included; None without a ledger.
      why_no_bound: reason why no epsilon holds for all runs, as a clause; empty if `epsilon` holds.
      elsewhere: number of runs that are stored in other folders.
      taken_for_granted: assumptions about runs that may or may not be on the same records, one sentence each.
    """

    epsilon: float | None = None
    delta: float | None = None
    runs: int | None = None
    why_no_bound: str = ""
    elsewhere: int = 0
    taken_for_granted: tuple[str, ...] = ()


class SearchFacts(Settings):
    """A private search that the ledger was charged for.

    Attributes:
      method: title of the method.
      searched: names of the searched hyper-parameters.
      candidates: number of candidate combinations of hyper-parameter values.
      runs: distribution of the number of runs: a name, or the shape of a truncated negative binomial distribution.
      mean_runs: mean number of runs; None where every candidate was tried once.
    """

    method: str
    searched: tuple[str, ...]
    candidates: int
    runs: str | float
    mean_runs: float | None


class TuningFacts(Settings):
    """The choices that were made by looking at results.

    Attributes:
      methods_compared: number of methods with results; a larger number of methods in the statement takes precedence.
      tuned: names of the settings that were chosen by looking at results.
      configurations_tried: number of configurations whose results were looked at, the chosen one included.
      search: the private search, if there was one.
      charged_epsilon: epsilon that the silo with the largest spending, or every user, would have spent if every tried
        configuration were charged as a release; None if no such epsilon applies.
      charged_delta: delta of `charged_epsilon`.
    """

    methods_compared: int = 1
    tuned: tuple[str, ...] = ()
    configurations_tried: int = 1
    search: SearchFacts | None = None
    charged_epsilon: float | None = None
    charged_delta: float | None = None


class StatementFacts(Settings):
    """The facts that statements about silos and statements about users have in common.

    Attributes:
      methods: the compared methods, at least one.
      on_record: cost of all training runs on the same records.
      tuning: choices that were made by looking at results.
      generator: generator of random bits in training.
      taken_from_records: constants that preparation took from all clients' records without noise, in words.
    """

    are_users: ClassVar[bool]

    methods: tuple[MethodFacts, ...]
    on_record: RunsOnRecord = RunsOnRecord()
    tuning: TuningFacts = TuningFacts()
    generator: Generator = "philox"
    taken_from_records: tuple[str, ...] = ()

    @property
    def covered(self) -> tuple[MethodFacts, ...]:
        """The methods that the claim is about: the exported methods, or all methods if none was exported."""
        return tuple(method for method in self.methods if method.exported) or self.methods

    @property
    def budget_exposure(self) -> BudgetExposure:
        """The largest exposure of budgets over all methods."""
        if self.exposing:
            return "inferable"
        return "public" if any(method.budget_exposure == "public" for method in self.methods) else "none"

    @property
    def exposing(self) -> tuple[MethodFacts, ...]:
        """Methods whose uploads show clients' budgets."""
        return tuple(method for method in self.methods if method.budget_exposure == "inferable")

    @property
    def compared(self) -> int:
        """Number of methods from which one may have been chosen by looking at results."""
        return max(self.tuning.methods_compared, len(self.methods))


class SyntheticFacts(Settings):
    """Silos' synthetic data, and the claims for the data and for the shared model, which is made of released values.

    Attributes:
      generator: kind of the generator.
      examples: number of synthetic examples of each silo, a public constant.
      rounds: number of rounds, from the first, that trained on synthetic data alone.
      is_adapted_privately: whether later rounds adapted models to records by DP-SGD; otherwise, without clip and noise.
      epsilons: cost of each silo's synthetic data alone, at the silo's delta; infinite for the claim `none`.
      claim: claim for synthetic data.
      claim_reason: reason for the claim, in one line.
      shared_epsilons: as `epsilons`, for the shared model and each silo's updates, which may also depend on released
        statistics.
      shared_claim: claim for the shared model and updates.
      shared_claim_reason: reason for this claim, in one line.
    """

    generator: str
    examples: int
    rounds: int
    is_adapted_privately: bool
    epsilons: tuple[float, ...]
    claim: str
    claim_reason: str
    shared_epsilons: tuple[float, ...]
    shared_claim: str
    shared_claim_reason: str


class SiloFacts(StatementFacts, tag="silos"):
    """The facts of silos that protect their records or, where records are rows of a contact graph, people or pairs.

    Attributes:
      silos: costs of every silo, for one method; at least one silo.
      clip_norm: L2 norm to which each record's gradient is clipped, over all weights jointly.
      steps: number of noisy gradient computations of one method in one silo, the largest over the methods.
      sampler: sampling of batches, as the accounting treats it: `poisson`, `full` or `paper_shuffled`.
      row_influence: for rows of a contact graph, the protected unit and the largest number of records that one unit
        changes; None where each record is a unit.
      other_releases: releases in the ledgers besides gradients, in words.
      num_examples_are_noised: whether silos' numbers of records were released with noise; otherwise they are public.
      level: `own` if each silo's noise suits the silo's target; `minimum` if it suits the smallest target of all silos.
      has_common_noise: whether all silos have the same configured noise multiplier, and leave when their budgets are
        spent.
      synthetic: silos' synthetic data; None without synthetic data.
    """

    are_users = False

    silos: tuple[SiloCosts, ...]
    clip_norm: float
    steps: int
    sampler: str = "poisson"
    row_influence: RowInfluence | None = None
    other_releases: tuple[str, ...] = ()
    num_examples_are_noised: bool = False
    level: Literal["own", "minimum"] = "own"
    has_common_noise: bool = False
    synthetic: SyntheticFacts | None = None

    @property
    def labels(self) -> tuple[float, ...]:
        """The epsilons that an asymptotic formula states for silos' noise; empty where noise follows from targets."""
        return tuple(silo.noise_label for silo in self.silos if silo.noise_label is not None)

    @property
    def unit(self) -> str:
        """The protected unit: `silo example`, `node` or `edge`."""
        return "silo example" if self.row_influence is None else self.row_influence.unit

    @property
    def most_spent(self) -> float:
        """The largest epsilon that one method spent in a silo; infinite where a silo has no bound."""
        return max(silo.epsilon_spent for silo in self.silos)

    @property
    def largest_delta(self) -> float:
        """The largest delta over silos, for one method."""
        return max(silo.delta for silo in self.silos)

    @property
    def epsilon_of_two(self) -> float:
        """The sum of the two largest epsilons of silos; infinite with a single silo, or if a silo has no bound."""
        spent = sorted(silo.epsilon_spent for silo in self.silos)
        return sum(spent[-2:]) if len(spent) > 1 else math.inf

    @property
    def is_bare(self) -> bool:
        """Whether no silo added noise."""
        return not any(silo.noise_multiplier for silo in self.silos)

    @property
    def bare(self) -> tuple[SiloCosts, ...]:
        """Silos that added no noise or have no bound; if there are any, nothing is claimed for all silos together."""
        return tuple(silo for silo in self.silos if not (math.isfinite(silo.epsilon_spent) and silo.noise_multiplier))

    @property
    def bounded(self) -> tuple[SiloCosts, ...]:
        """Silos with a finite epsilon."""
        return tuple(silo for silo in self.silos if math.isfinite(silo.epsilon_spent))

    @property
    def over_target(self) -> tuple[SiloCosts, ...]:
        """Silos that spent more than their budget."""
        return tuple(silo for silo in self.bounded if silo.epsilon_spent > silo.epsilon_target)

    @property
    def left_early(self) -> tuple[SiloCosts, ...]:
        """Silos that left before the last round, in the order in which they left."""
        longest = max(silo.last_round for silo in self.silos)
        early = [silo for silo in self.silos if silo.last_round < longest]
        return tuple(sorted(early, key=lambda silo: silo.last_round))


class UserFacts(StatementFacts, tag="users"):
    """The facts of users, each protected as a whole; every method has `user_costs`.

    Attributes:
      sums: sampling, clipping, summation and noise of users' releases.
    """

    are_users = True
    unit: ClassVar[str] = "user"

    sums: UserSums

    @property
    def costs(self) -> dict[str, UserCosts]:
        """Costs of each method, by the method's name."""
        return {method.name: method.user_costs for method in self.methods if method.user_costs is not None}

    @property
    def worst(self) -> UserCosts:
        """Costs of the method with the largest epsilon."""
        return max(self.costs.values(), key=lambda own: own.epsilon_spent)

    @property
    def is_bare(self) -> bool:
        """True if none of the methods added noise to users' releases."""
        return all(own.is_bare for own in self.costs.values())

    @property
    def bare(self) -> tuple[MethodFacts, ...]:
        """Covered methods that added no noise to users' releases; if there are any, nothing is claimed."""
        return tuple(one for one in self.covered if one.user_costs and one.user_costs.is_bare)

    @property
    def most_spent(self) -> float:
        """The largest epsilon that one method spent; infinite where a method has no bound."""
        return self.worst.epsilon_spent

    @property
    def largest_delta(self) -> float:
        """The largest delta over methods."""
        return max(own.delta for own in self.costs.values())

    @property
    def epsilon_of_two(self) -> float:
        """The epsilon for a group of two users."""
        return 2 * self.most_spent

    @property
    def delta_of_two(self) -> float:
        """The delta for a group of two users."""
        # Beyond an epsilon of 100, delta is far above 1 anyway, and the exponential overflows.
        return (1 + math.exp(min(self.most_spent, 100.0))) * self.worst.delta

    @property
    def over_target(self) -> tuple[MethodFacts, ...]:
        """Methods that spent more than the budget."""
        costs = ((method, method.user_costs) for method in self.methods)
        return tuple(method for method, own in costs if own and own.epsilon_spent > own.epsilon_target)
