"""Gives the facts of privacy statements: what draws, whom a silo protects, what users paid, how their sums are noised.

A silo's unit is one record or, where records are rows of a contact graph, a person or a pair.
"""

import dataclasses
import math
from typing import Literal, get_args

from tff_pdp.data.manifest import RowInfluence

# Why nothing is claimed of a run with training.test_only_seed.
FIXED_SEED = "test mode: all noise follows from a fixed seed, so anyone can subtract it"

# What makes the random bits inside of computations: `tff_pdp.privacy.mechanisms.random_bits`.
Generator = Literal["philox", "chacha20"]
GENERATORS: tuple[Generator, ...] = get_args(Generator)
_PHILOX = "random bits are Philox's, which is no cryptographic generator"
_EXAMPLES = "an example's gradient is taken not to depend, to the last bit, on the others in its batch"


def generator_condition(generator: Generator) -> str:
    """Under which condition a guarantee holds that draws from a generator; empty for a cryptographic one."""
    return _PHILOX if generator == "philox" else ""


def condition_of_examples(generator: Generator) -> str:
    """Under which conditions of floating point and random bits a guarantee holds that sums up examples' gradients."""
    return "; ".join(filter(None, [_EXAMPLES, generator_condition(generator)]))


def claim_of_several(claim: str, reason: str) -> tuple[str, str]:
    """The claim for a run, whose own is given, and others on record, which do not say what made their random bits."""
    if claim not in ("formal", "formal-conditional") or _PHILOX in reason:
        return claim, reason
    others = "random bits of other runs on record may be Philox's, which is no cryptographic generator"
    return "formal-conditional", "; ".join(filter(None, [reason.strip().rstrip("."), others]))


@dataclasses.dataclass(frozen=True)
class SiloUnit:
    """The words for what silos protect.

    Attributes:
      name: the unit of protection.
      adjacency: how neighbouring data sets differ.
      protected: what has the guarantee, in a silo.
      covered: what of it the guarantee of training is about.
      unit_text: what one guarantee is about, in whole sentences.
      several_heading: of the paragraph on those who have several such guarantees.
      several_text: that paragraph; empty where it follows from what silos spent.
      mechanism_text: what the accounting does about several records, if there is anything to say.
      size_text: why the number of records counts as public, and what if it is not.
    """

    name: str
    adjacency: str
    protected: str
    covered: str
    unit_text: str
    several_heading: str
    several_text: str = ""
    mechanism_text: str = ""
    size_text: str = ""


RECORDS = SiloUnit(
    name="silo example",
    adjacency="add or remove one record of one silo",
    protected="training records",
    covered="training records only",
    unit_text="Unit: one example of one silo. Two data sets are neighbours if they differ by adding or removing one "
    "record of one silo, all other silos unchanged. The statement is about any one training record, not about a silo "
    "as a whole.",
    several_heading="One person in several silos",
    size_text="The number of training records of each silo (n_k) is treated as public, as are sampling rates, noise "
    "multipliers and budgets, the number of steps, the list of silos, and the initial weights. Under adding or "
    "removing a record n_k is strictly private: where it must stay secret, this statement does not hold. Under "
    "zero-out adjacency, where all that one record adds to any sum is replaced by zero and n_k stays, the same ε "
    "and δ hold without this condition: that there is such a record is then not hidden.",
)

_PERSON_DIFFERS = {
    "replace_one": "one person takes other values, its disease states included, and other contacts",
    "replace_special": "one person is there with all its contacts, or is as if it were not, its records all zeros",
}


def unit_of(row_influence: RowInfluence | None) -> SiloUnit:
    """The words for what the rows of a data set promise to protect; for single records where they promise nothing."""
    if row_influence is None:
        return RECORDS
    return _person(row_influence) if row_influence.unit == "node" else _pair(row_influence)


def _person(influence: RowInfluence) -> SiloUnit:
    differs = _PERSON_DIFFERS[influence.adjacency]
    return SiloUnit(
        name="node",
        adjacency=f"{differs}, in one silo",
        protected="people",
        covered="what each person puts into training records, its own and its contacts'",
        unit_text=f"Unit: one person of one silo's contact graph (node). Two data sets are neighbours if {differs}, "
        "and all other people, their states and contacts among themselves, and all other silos are unchanged. A record "
        "is one person's row, made of its own data and its contacts', so that a person is in several. "
        f"{_rows_text(influence)} Whom a person has infected is in the states of those people, which neighbouring data "
        "sets share: what someone's disease did to others is not hidden, nor what others' states say about them.",
        several_heading="Several people, and several silos",
        several_text="The records of a silo are made of its own people only, contacts between silos are left out: each "
        "person has the guarantee of its own silo, and nothing adds up over silos. It is for one person; what a group "
        "has in common, such as a household, is protected less.",
        mechanism_text=_mechanism_text(influence),
        size_text=_size_text("that someone is listed in a silo's data is not hidden by this statement."),
    )


def _pair(influence: RowInfluence) -> SiloUnit:
    return SiloUnit(
        name="edge",
        adjacency="all contacts of one pair of people of one silo are there or are not",
        protected="contacts",
        covered="what each pair's contacts put into training records",
        unit_text="Unit: all contacts of one pair of people of one silo's contact graph (edge). Two data sets are "
        "neighbours if these contacts are there or are not, and everything else is unchanged. A record is one person's "
        f"row, made of its own data and its contacts'. {_rows_text(influence)} What is hidden is whether and how any "
        "two people met. People's own features and disease states are NOT protected.",
        several_heading="Several contacts of one person",
        several_text="The guarantee is for one pair. All contacts of one person together, or that it had any, are "
        "protected less, the less the more they are. Contacts between silos are left out of the records, so that "
        "nothing adds up over silos.",
        mechanism_text=_mechanism_text(influence),
        size_text=_size_text("people's own features and disease states are not hidden by this statement either."),
    )


def _rows_text(influence: RowInfluence) -> str:
    records = "record" if influence.num_rows == 1 else "records"
    return f"At most S = {influence.num_rows} {records} of a silo then differ ({influence.rule.rstrip('.')})."


def _mechanism_text(influence: RowInfluence) -> str:
    return (
        f"It counts all S = {influence.num_rows} records that may differ, as many as are in a batch at once, and lets "
        "each of them move the sum by up to twice the clip norm (Rényi DP), or by the clip norm towards records that "
        "count for nothing and again from there (privacy loss distributions, twice); the smaller figure is claimed."
    )


def _size_text(not_hidden: str) -> str:
    return (
        "The number of training records of each silo (n_k), which people belong to which silo, and S are treated as "
        "public, as are sampling rates, noise multipliers and budgets, the number of steps, the list of silos, and the "
        f"initial weights; {not_hidden}"
    )


@dataclasses.dataclass(frozen=True)
class UserCosts:
    """What the training of one method cost every user, and how its noise compares with what there is to learn.

    Attributes:
      epsilon_target: the budget; infinite without privacy.
      epsilon_spent: the smallest bound below; infinite where the claim is `none`, zero where nothing is released.
      epsilon_rdp: upper bound from Rényi accounting.
      epsilon_pld: upper bound from privacy loss distributions; NaN where it was not computed.
      delta: the delta of all three epsilons.
      noise_multiplier: z, of one round's release as a whole, or of a tree's nodes; zero where nothing is released.
      num_noised: how many values of a user's release noise changes anything by; zero where nothing is released.
      noise_to_signal: expected norm of the noise on a round's mean over the clip norm; for trees, of one node's.
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
        """Whether something was released without noise, so that no epsilon holds."""
        return not self.noise_multiplier and (self.num_noised > 0 or not math.isfinite(self.epsilon_spent))


@dataclasses.dataclass(frozen=True)
class UserSums:
    """How users' releases are drawn, clipped, summed and noised: the same for all methods of an experiment.

    Attributes:
      rounds: planned number of rounds.
      num_users: N, for which the sampling rate was set.
      is_constant: whether N is a public constant; otherwise it is the number of users in the data, taken for public.
      sampling_rate: q, the probability that a user is in a round's cohort; the share of users in it for trees.
      expected_cohort: the constant that means are divided by.
      clip_norm: C, L2 bound on all that one user releases in a round; the first of them where the clip adapts.
      noise_multiplier: z, as of `UserCosts`, of a method that releases something.
      quantile: of the norms, that the clip norm follows; None where it is fixed.
      count_stddev: standard deviation of the noise on the number of norms below the clip norm, where it adapts.
      sum_noise_multiplier: of the sum alone, where the clip norm adapts.
      rounds_per_tree: after which a tree starts anew; None where every round has noise of its own.
      weight_cap: the number of examples from which on a user counts as one; None where all users do.
      own_support: titles of methods whose users add shares of the noise, only where their own update is not zero.
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
