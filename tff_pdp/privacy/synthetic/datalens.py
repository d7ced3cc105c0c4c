"""Makes synthetic examples by DataLens: votes of teachers on disjoint parts of the records, with noise.

A student network makes examples. Each teacher, a discriminator on its own part of the records, votes on the direction
in which an example should change: +1 or -1 for the k features with the largest gradients. The Gaussian mechanism
releases the sum of votes, once for each example of each step, and the student follows votes that exceed a threshold.
With few teachers and a small budget the noise is larger than all votes together; `DataLens.check_noise` refuses such
settings.

On MNIST, pooled to 14 x 14 pixels, with 6,000 records and epsilon 10, classifiers trained on the result are no better
than chance, and with next to no noise hardly better. Use `dp_gaussian` instead.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import dp_accounting
import numpy as np
from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import exact_gaussian_epsilon
from tff_pdp.privacy.accounting.events import require
from tff_pdp.privacy.facts import Claim
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.base import Generator, SyntheticExamples, check_labels, draw_labels
from tff_pdp.privacy.synthetic.conditional import ExampleNetwork, noised_counts, noised_sum, to_unit
from tff_pdp.privacy.synthetic.paper_datalens import PaperAccount, even_parts
from tff_pdp.privacy.synthetic.teachers import Teachers, content_names, parts_by_hash
from tff_pdp.settings import Count, Delta, Epsilon, Positive, Settings, Share


class PaperBudget(Settings):
    """The budget at which the paper's data-dependent account ends training, without any guarantee.

    Attributes:
      epsilon: most epsilon by the paper's account.
      delta: delta of that account.
    """

    epsilon: Epsilon
    delta: Delta


class DataLens(Generator, tag="datalens"):
    """Trains a student network on noised votes of teachers.

    Attributes:
      teachers: M, number of teachers.
      votes: k, number of features that each teacher votes on, for each example.
      steps: number of the student's steps.
      fakes_per_step: b, number of examples on which teachers vote in each step.
      threshold: beta; a vote counts if its noised sum exceeds this share of all teachers.
      signs: `stochastic` votes, which are +1 with a probability that grows with the gradient, or `plain` signs.
      max_grad: largest gradient that a stochastic vote distinguishes from larger ones.
      gamma: change of a feature that a vote asks for, in shares of the range.
      student_rate: Adam's rate of the student.
      teacher_rate: Adam's rate of teachers.
      teacher_steps: teachers' steps before each step of the student.
      first_teacher_steps: teachers' steps before the student's first step.
      records_per_teacher: most records that one teacher uses.
      latents: number of latent numbers.
      student_units: units of the student's hidden layers.
      teacher_units: units of a teacher's hidden layer.
      labels: labels of examples: in the proportions of noised `counts`, or `uniform` over all classes as in the paper.
      count_share: a, share of the sensitivity of a joint release that class counts have, beside all votes.
      force: whether to make a release even if its noise exceeds the votes of all teachers together.
      paper_even_partition: whether to divide records as the paper's code does, without any guarantee.
      paper_data_dependent: the budget of the paper's data-dependent account, which ends training, without any
        guarantee. There are then at most `steps` steps.
    """

    teachers: Annotated[int, Meta(ge=1, le=10**5)] = 600
    votes: Count = 75
    steps: Count = 150
    fakes_per_step: Annotated[int, Meta(ge=1, le=1000)] = 10
    threshold: Share = 0.2
    signs: Literal["stochastic", "plain"] = "stochastic"
    max_grad: Positive = 1e-5
    gamma: Share = 1e-3
    student_rate: Positive = 1e-3
    teacher_rate: Positive = 1e-3
    teacher_steps: Count = 2
    first_teacher_steps: Count = 10
    records_per_teacher: Annotated[int, Meta(ge=1, le=1000)] = 32
    latents: Count = 50
    student_units: Sequence[Count] = (256, 256)
    teacher_units: Count = 32
    labels: Literal["counts", "uniform"] = "counts"
    count_share: Share = 0.2
    force: bool = False
    paper_even_partition: bool = False
    paper_data_dependent: PaperBudget | None = None

    @property
    def queries(self) -> int:
        """Q, the number of releases of votes."""
        return self.steps * self.fakes_per_step

    @property
    def why_not_private(self) -> str:
        """The reasons why a `paper_` setting guarantees nothing; empty without such a setting."""
        partition = (
            "records are divided class by class with wrap-around, so that one record may be given to several teachers "
            "and may move the parts of all others"
        )
        account = (
            "the number of steps follows from the votes by an account that depends on the records, and whose bound is "
            "for the largest vote alone, not for all noised votes"
        )
        reasons = [partition] * self.paper_even_partition + [account] * (self.paper_data_dependent is not None)
        return "; ".join(reasons)

    @property
    def claim(self) -> tuple[Claim, str]:
        """The strength of the guarantee, and its condition."""
        if self.why_not_private:
            return "none", self.why_not_private
        return "formal-conditional", "a teacher's votes are taken not to depend, to the last bit, on others' records"

    def sigma(self, noise_multiplier: float) -> float:
        """Returns the standard deviation of the noise on a sum of votes, in votes."""
        return 2 * math.sqrt(self.votes) * noise_multiplier

    def count_noise(self, noise_multiplier: float) -> float:
        """Returns the noise multiplier of class counts."""
        return noise_multiplier / (self.count_share * math.sqrt(self.queries))

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of Q Gaussian sums of votes and, unless labels are uniform, of the class counts.

        Args:
          noise_multiplier: standard deviation of the noise on a sum of votes divided by twice the root of k.
        """
        votes = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise_multiplier), self.queries)
        if self.labels == "uniform":
            return votes
        counts = dp_accounting.GaussianDpEvent(self.count_noise(noise_multiplier))
        return dp_accounting.ComposedDpEvent([counts, votes])

    def check_noise(self, noise_multiplier: float) -> None:
        """Checks that the noise on a sum of votes is not larger than the largest sum, unless `force` is set.

        Raises:
          ConfigError: the standard deviation is larger than the number of teachers.
        """
        super().check_noise(noise_multiplier)
        sigma = self.sigma(noise_multiplier)
        if sigma > self.teachers and not self.force:
            raise ConfigError(
                f"datalens: the noise on each sum of votes has the standard deviation {sigma:.4g}, but {self.teachers} "
                f"teachers together have at most {self.teachers} votes for a feature: votes cannot exceed the noise. "
                "Raise epsilon or teachers, or lower votes, steps or fakes_per_step; dp_gaussian needs fewer records. "
                "Nothing was released; force: true releases all the same"
            )

    def check(self, x: np.ndarray, y: np.ndarray) -> None:
        """Checks shapes and labels."""
        num_features = math.prod(x.shape[1:])
        if self.votes > num_features:
            raise ConfigError(f"votes is {self.votes}, but examples have {num_features} features")
        check_labels(x, y, self.num_classes)
        if self.paper_even_partition and len(x) < self.teachers:
            raise ConfigError(
                f"paper_even_partition: {len(x)} records are too few for {self.teachers} teachers, each of which gets "
                "at least one"
            )

    def fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        noise_multiplier: float,
        draws: ExactDraws,
        *,
        ids: Sequence[str] | None = None,
    ) -> SyntheticExamples:
        """Makes synthetic examples by `datalens`."""
        return datalens(x, y, self, noise_multiplier, draws, ids=ids)


def datalens(
    x: np.ndarray,
    y: np.ndarray,
    settings: DataLens,
    noise_multiplier: float,
    draws: ExactDraws,
    *,
    ids: Sequence[str] | None = None,
) -> SyntheticExamples:
    """Trains a student on noised votes of teachers, and makes synthetic examples by the student.

    A record goes to the teacher that a keyed hash of its name gives. By default, the name is the record's content. A
    record that is added or removed then changes the part of one teacher. A record whose content changes counts as
    removed and added, and changes two. With `ids` as names, a new content under the same id changes one teacher, too.
    The place in the file is no name: removing a record would rename all later ones.

    Guarantee: under ADD_OR_REMOVE_ONE adjacency, `settings.event(noise_multiplier)` covers the result, if no setting
      begins with `paper_`. One teacher's votes change, by at most twice the root of k in L2 norm (`Teachers.votes`);
      one class count changes by 1. With `ids`, the same bound on votes holds for a record that is replaced under the
      same id. Everything else is a function of released values and of random bits.
    Assumes: as in `Generator.fit`. NumPy's operations on a stack of matrices treat each matrix on its own.

    Source: Wang et al., "DataLens: Scalable Privacy Preserving Training via Gradient Compression and Aggregation", CCS
      2021, algorithms 1 and 2. Here teachers have parts of unequal size, class counts are released with noise, and the
      account does not depend on the records.

    Args, Raises: as in `Generator.fit`. ConfigError also if `ids` are not one for each record.
    """
    settings.check_noise(noise_multiplier)
    settings.check(x, y)
    if ids is not None and len(ids) != len(x):
        raise ConfigError(f"there are {len(x)} examples, but {len(ids)} ids")
    rows, num_features = to_unit(x, settings), math.prod(x.shape[1:])
    key = draws.words(8).tobytes()
    if settings.paper_even_partition:
        parts = even_parts(y, settings.num_classes, settings.teachers)
    else:
        names = content_names(x, y) if ids is None else [name.encode() for name in ids]
        parts = parts_by_hash(names, key, settings.teachers)
    teachers = Teachers(
        rows,
        y,
        parts,
        num_classes=settings.num_classes,
        capacity=settings.records_per_teacher,
        hidden_units=settings.teacher_units,
        learning_rate=settings.teacher_rate,
        draws=draws,
    )
    counts = np.ones(settings.num_classes)
    if settings.labels == "counts":
        counts = noised_counts(y, settings.num_classes, settings.count_noise(noise_multiplier), draws)
    student = ExampleNetwork(
        num_features, settings.num_classes, settings.latents, settings.student_units, settings.student_rate, draws
    )
    budget = settings.paper_data_dependent
    account = budget and PaperAccount(budget.epsilon, budget.delta)
    for step in range(settings.steps):
        for _ in range(settings.teacher_steps if step else settings.first_teacher_steps):
            labels = draw_labels(counts, settings.fakes_per_step, draws)
            teachers.train(np.asarray(student.examples(student.inputs(labels))), labels)
        labels = draw_labels(counts, settings.fakes_per_step, draws)
        inputs = student.inputs(labels)
        made = np.asarray(student.examples(inputs))
        max_grad = settings.max_grad if settings.signs == "stochastic" else None
        noised = np.stack(
            [
                noised_sum(votes.sum(axis=0, dtype=np.int64), 4 * settings.votes, noise_multiplier, draws)
                for votes in teachers.votes(made, labels, settings.votes, max_grad, draws)
            ]
        )
        if account and account.is_spent(noised, settings.sigma(noise_multiplier), settings.votes):
            break
        asked = np.sign(noised) * (np.abs(noised) > settings.threshold * settings.teachers)
        _follow(student, inputs, made + settings.gamma * asked.astype(np.float32))
    return student.synthetic(counts, x.shape[1:], settings)


def queries_within_budget(votes: int, sigma: float, epsilon: float, delta: float) -> int:
    """Counts the sums of votes that fit into a budget, by the exact formula for Gaussian sums; class counts cost more.

    Noise on votes is drawn exactly, so that a charge for drawn noise, which would lower the number, does not exist.

    Args:
      votes: k, number of features that each teacher votes on.
      sigma: standard deviation of the noise on each sum, in votes.
      epsilon: the budget.
      delta: delta of the budget.

    >>> queries_within_budget(300, 800, 10.0, 1e-5)
    2134
    """
    require(votes >= 1, "votes", votes, "at least 1")
    require(0 < sigma < math.inf, "sigma", sigma, "positive and finite")
    require(0 < epsilon < math.inf, "epsilon", epsilon, "positive and finite")
    require(0 < delta < 1, "delta", delta, "strictly between 0 and 1")
    noise_multiplier = sigma / (2 * math.sqrt(votes))

    def fits(queries: int) -> bool:
        return exact_gaussian_epsilon(noise_multiplier / math.sqrt(queries), delta) <= epsilon

    least, most = 0, 1
    while fits(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _follow(student: ExampleNetwork, inputs: np.ndarray, targets: np.ndarray) -> None:
    """Takes a step of the student on the squared distance between its examples and what teachers ask for."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        distance = tf.reduce_sum(tf.square(targets - student.examples(inputs)))
    student.learn(tape.gradient(distance, list(student.weights.values())))
