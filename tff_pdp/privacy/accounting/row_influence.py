"""Bounds the privacy cost of noisy sums over batches of rows, for a person, or a pair of people, in several rows.

The two events of this module bound the Renyi divergence between noisy sums of two data sets of equal size, of which at
most S rows differ, in any way. Proof: batches are drawn by position, independently of the rows, so each set of
positions has the same probability in both data sets. Given a set in which rho rows differ, the sums are Gaussians of
standard deviation z C (noise multiplier z, clip norm C). Their means are at most 2 rho C apart, because a clipped
gradient moves by at most 2 C, so their divergence of order alpha is at most 2 alpha rho^2 / z^2. The number
exp((alpha - 1) divergence) is an f-divergence, hence jointly convex. For mixtures over all sets of positions, this
number is therefore at most the mean over rho of the numbers for single sets. Here rho is binomial (Poisson batches) or
hypergeometric (batches of fixed size), and this mean grows with the number of rows that differ.

Source: Daigavane et al., "Node-level differentially private graph neural networks", 2021; for replaced rows, Liu, "On
Privacy and Personalization in Machine Learning", CMU-RI-TR-23-17, 2023, theorem 2.4.4.

`zeroed_rows_pld` bounds the privacy loss between a data set and a copy of the data set in which S rows are zeroed. A
Poisson batch with rate q contains rho of the S rows with probability Binomial(S, q)(rho); their clipped gradients move
the sum by at most rho C, and zeroed rows do not move the sum. So the pair of distributions

    sum over rho of Binomial(S, q)(rho) Normal(rho, z^2)    and    Normal(0, z^2)

dominates the true pair, whatever directions the gradients have, and even if later steps depend on earlier steps.

Source: Choquette-Choo, Ganesh, Steinke and Thakurta, "Privacy amplification for matrix mechanisms", ICLR 2024, section
4 (mixtures of vectors are dominated by mixtures of the vectors' norms); Charles et al., "Fine-tuning large language
models with user-level differential privacy", 2024 (the same mixture, for a user's examples).
"""

import math
from collections.abc import Callable, Iterable

import attr
import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import special, stats

from tff_pdp.privacy.accounting.accountants import Adjacency, solve_noise_multiplier
from tff_pdp.privacy.accounting.events import CustomDpEvent, flatten_event, repeated, require

# A row that differs moves the sum by up to 2 C: (2 rho)^2 / 2 in units of rho^2.
_REPLACED = 2.0
_MOST_ROWS_IN_A_MIXTURE = 500


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PoissonRowsDpEvent(CustomDpEvent):
    """One noisy sum over a Poisson batch of rows.

    Guarantee, Assumes: as in `poisson_rows_event`.
    """

    noise_multiplier: float
    sampling_rate: float
    num_changed_rows: int

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Bounds divergences by the module's docstring for binomial rho; returns float64 shaped like `orders`."""
        rows = np.arange(self.num_changed_rows + 1)
        log_probabilities = stats.binom.logpmf(rows, self.num_changed_rows, self.sampling_rate)
        return _divergences(orders, rows, log_probabilities, self.noise_multiplier)

    is_through_zeros = True

    @property
    def zeroed_width_and_mean(self) -> tuple[float, float]:
        """Range and approximate mean of the losses of `zeroed_pld`; zeros if `zeroed_pld` is None."""
        if self.num_changed_rows > _MOST_ROWS_IN_A_MIXTURE:
            return 0.0, 0.0
        mixture = _Mixture(self.noise_multiplier, self.sampling_rate, self.num_changed_rows)
        return mixture.loss_range[1] - mixture.loss_range[0], mixture.mean_loss()

    def zeroed_pld(self, discretisation: float) -> privacy_loss_distribution.PrivacyLossDistribution | None:
        """Returns `zeroed_rows_pld`; None where so many rows differ that computing takes too long."""
        if self.num_changed_rows > _MOST_ROWS_IN_A_MIXTURE:
            return None
        return zeroed_rows_pld(self.noise_multiplier, self.sampling_rate, self.num_changed_rows, discretisation)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class FixedSizeRowsDpEvent(CustomDpEvent):
    """One noisy sum over a batch of `batch_size` rows, drawn uniformly without replacement.

    Guarantee, Assumes: as in `fixed_size_rows_event`.
    """

    noise_multiplier: float
    num_rows: int
    batch_size: int
    num_changed_rows: int

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Bounds divergences by the module's docstring for hypergeometric rho; returns float64 shaped like `orders`."""
        rows, log_probabilities = _hypergeometric(self.num_rows, self.num_changed_rows, self.batch_size)
        return _divergences(orders, rows, log_probabilities, self.noise_multiplier)


def poisson_rows_event(
    sampling_rate: float, noise_multiplier: float, num_changed_rows: int, steps: int
) -> dp_accounting.DpEvent:
    """Builds the event of `steps` noisy sums, each over a fresh Poisson batch of rows that are not independent.

    Guarantee: the epsilon bounds hold for DP-SGD on data sets of rows, if at most `num_changed_rows` rows differ, in
      any way, between neighbours: anyone in at most `num_changed_rows` rows is protected.
    Assumes: neighbouring data sets have the same number of rows, and all other rows are equal, at equal positions; in
      each step every row is drawn independently with probability `sampling_rate`; each row's gradient is clipped to
      norm C by itself; the noise has standard deviation `noise_multiplier * C`; the sum is divided by a constant.

    Args:
      sampling_rate: probability in [0, 1] that one row takes part in one step.
      noise_multiplier: noise standard deviation / clip norm.
      num_changed_rows: S, the largest number of rows that differ; at most the number of rows.
      steps: number of noisy sums released.

    Raises:
      ConfigError: a value is out of range.
    """
    require(0 <= sampling_rate <= 1, "sampling_rate", sampling_rate, "a probability between 0 and 1")
    event = PoissonRowsDpEvent(float(noise_multiplier), float(sampling_rate), int(num_changed_rows))
    return _repeated(event, num_changed_rows, steps, is_empty=sampling_rate == 0)


def fixed_size_rows_event(
    num_rows: int, batch_size: int, noise_multiplier: float, num_changed_rows: int, steps: int
) -> dp_accounting.DpEvent:
    """Builds the event of `steps` noisy sums over fresh batches of fixed size, whose rows are not independent.

    Guarantee: as in `poisson_rows_event`.
    Assumes: as in `poisson_rows_event`, but each batch is uniform among all sets of `batch_size` rows, independent of
      all other batches. (Parts of one shuffled epoch are dependent.)

    Args:
      num_rows: n, number of rows in the data set.
      batch_size: b, number of rows in a batch.
      noise_multiplier: noise standard deviation / clip norm.
      num_changed_rows: S, the largest number of rows that differ; lowered to n if larger.
      steps: number of noisy sums released.

    Raises:
      ConfigError: a value is out of range.
    """
    require(num_rows >= 1 and num_rows == int(num_rows), "num_rows", num_rows, "a whole number, at least 1")
    is_size = 0 <= batch_size <= num_rows and batch_size == int(batch_size)
    require(is_size, "batch_size", batch_size, f"a whole number between 0 and {num_rows}, the number of rows")
    changed = min(int(num_changed_rows), int(num_rows))
    event = FixedSizeRowsDpEvent(float(noise_multiplier), int(num_rows), int(batch_size), changed)
    return _repeated(event, num_changed_rows, steps, is_empty=batch_size == 0)


def calibrate_rows_noise(
    make_event: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.REPLACE_ONE,
    fixed_events: Iterable[dp_accounting.DpEvent] = (),
) -> float:
    """Finds the smallest noise multiplier (relative error 2e-5) with which an event of this module fits into a budget.

    Guarantee: with the returned noise multiplier, the best bound of the event and `fixed_events` is at most `epsilon`,
    as the function checks.
    Assumes: the event's assumptions hold.

    Args:
      make_event: function that builds the event for a given noise multiplier.
      epsilon: the budget; for an infinite budget, which needs no noise, 0 is returned.
      delta: delta of (epsilon, delta)-DP, in (0, 1).
      adjacency: neighbouring relation of the data sets; an event of this module holds for every relation.
      fixed_events: other releases within the same budget.

    Raises:
      BudgetError: no noise multiplier up to 1e4 meets the budget.
      ConfigError: delta is out of range.

    >>> make_event = lambda z: poisson_rows_event(1.0, z, num_changed_rows=3, steps=1)
    >>> round(calibrate_rows_noise(make_event, epsilon=1.0, delta=1e-5), 1)  # The sum moves by 6 C.
    22.4
    """
    require(0 < delta < 1, "delta", delta, "strictly between 0 and 1")
    guess = _guess(make_event(1.0), delta) / epsilon if 0 < epsilon < math.inf else 1.0
    fixed = list(fixed_events)
    return solve_noise_multiplier(
        lambda z: dp_accounting.ComposedDpEvent([make_event(z), *fixed]), epsilon, delta, adjacency, guess
    )


def _guess(event: dp_accounting.DpEvent, delta: float) -> float:
    """Guesses the noise for an epsilon of 1: that of all sums together, each moved by its expectation."""
    moved = 0.0
    for part, count in flatten_event(event):
        rows = getattr(part, "num_changed_rows", 1)
        rate = getattr(part, "sampling_rate", getattr(part, "batch_size", 1) / getattr(part, "num_rows", 1))
        moved += count * (rows * rate) ** 2
    return 2 * math.sqrt(2 * moved * math.log(1 / delta))


def _divergences(
    orders: np.ndarray, rows: np.ndarray, log_probabilities: np.ndarray, noise_multiplier: float
) -> np.ndarray:
    """Computes ln E exp(2 order (order - 1) rho^2 / z^2) / (order - 1) at each order."""
    orders = np.asarray(orders, np.float64)
    differ = rows > 0
    rows, log_probabilities = rows[differ].astype(np.float64), log_probabilities[differ]
    exponents = (orders * (orders - 1) * _REPLACED / noise_multiplier**2)[..., np.newaxis] * rows**2
    # ln E exp(x) as ln(1 + E(exp(x) - 1)): where x is small, the probabilities' own rounding would be all that is left.
    with np.errstate(divide="ignore"):
        log_excess = special.logsumexp(log_probabilities + exponents + np.log(-np.expm1(-exponents)), axis=-1)
    return np.logaddexp(0.0, log_excess) / (orders - 1)


def _hypergeometric(num_rows: int, num_changed_rows: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers of differing rows in a batch of fixed size, and the logarithm of each number's probability."""
    changed, others = num_changed_rows, num_rows - num_changed_rows
    rows = np.arange(max(0, batch_size - others), min(changed, batch_size) + 1)
    before = rows[:-1].astype(np.float64)
    # From each probability to the next: scipy's come from logarithms of factorials, which round at large n.
    ratios = (changed - before) * (batch_size - before) / ((before + 1) * (others - batch_size + before + 1))
    logarithms = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    return rows, logarithms - special.logsumexp(logarithms)


def _repeated(
    event: PoissonRowsDpEvent | FixedSizeRowsDpEvent, num_changed_rows: int, steps: int, is_empty: bool
) -> dp_accounting.DpEvent:
    is_count = num_changed_rows >= 0 and num_changed_rows == int(num_changed_rows)
    require(is_count, "num_changed_rows", num_changed_rows, "a whole number, zero or more")
    return repeated(event, event.noise_multiplier, steps, is_empty=is_empty or num_changed_rows == 0)


# Largest x, in standard deviations: beyond it, and beyond the largest loss, losses count as infinite.
_TAIL = 12.0
_LARGEST_LOSS = 40.0
# For a first guess of where a loss lies, which Newton's method then improves.
_GUESSES = 20_000
_NEWTON_STEPS = 3
# Numbers in memory at a time.
_BLOCK = 1 << 22


def zeroed_rows_pld(
    noise_multiplier: float, sampling_rate: float, num_rows: int, discretisation: float
) -> privacy_loss_distribution.PrivacyLossDistribution | None:
    """Returns a distribution that dominates one step's privacy loss between a data set and its copy with zeroed rows.

    None if the noise is too small.

    Args:
      noise_multiplier: z, noise standard deviation / clip norm.
      sampling_rate: q, probability in (0, 1] that one row takes part.
      num_rows: S, the number of zeroed rows; at least 1.
      discretisation: cell width of the grid of losses.
    """
    mixture = _Mixture(noise_multiplier, sampling_rate, num_rows)
    if mixture.is_hopeless:
        return None
    return privacy_loss_distribution.PrivacyLossDistribution(
        _dominating(mixture.zeroed, mixture.loss_range, discretisation),
        _dominating(mixture.unzeroed, tuple(-loss for loss in reversed(mixture.loss_range)), discretisation),
    )


class _Mixture:
    """The pair of distributions of the module's docstring, with its privacy losses and hockey-stick divergences."""

    def __init__(self, noise_multiplier: float, sampling_rate: float, num_rows: int):
        with np.errstate(divide="ignore"):
            logarithms = stats.binom.logpmf(np.arange(num_rows + 1), num_rows, sampling_rate)
        likely = logarithms > -700
        self._shifts = np.flatnonzero(likely) / noise_multiplier
        # Rounding of the probabilities must not look like a difference between the two distributions.
        self._logarithms = logarithms[likely] - special.logsumexp(logarithms[likely])
        self._low, self._high = self._shifts[0] - _TAIL, self._shifts[-1] + _TAIL
        (low, high), _ = self._loss(np.array([self._low, self._high]))
        self.loss_range = (max(float(low), -_LARGEST_LOSS), min(float(high), _LARGEST_LOSS))
        # Nearly all losses are beyond the largest loss that is looked at.
        self.is_hopeless = low >= _LARGEST_LOSS or high <= -_LARGEST_LOSS

    def mean_loss(self) -> float:
        """Returns the mean loss of the mixture against the Gaussian around zero, by numerical integration."""
        points = np.linspace(self._low, self._high, _GUESSES)
        density = self._mean(points, lambda x, shifts: stats.norm.pdf(x - shifts))
        return float(np.sum(density * self._loss(points)[0]) * (points[1] - points[0]))

    def zeroed(self, losses: np.ndarray) -> np.ndarray:
        """Returns the hockey stick: the mixture's excess over exp(loss) times the Gaussian around zero."""
        points = self._points(losses)
        return self._mean(points, lambda x, shifts: special.ndtr(shifts - x)) - np.exp(losses) * special.ndtr(-points)

    def unzeroed(self, losses: np.ndarray) -> np.ndarray:
        """Returns the excess of the Gaussian around zero over exp(loss) times the mixture, at each loss."""
        points = self._points(-losses)
        return special.ndtr(points) - np.exp(losses) * self._mean(points, lambda x, shifts: special.ndtr(x - shifts))

    def _loss(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ln(mixture / Gaussian around zero), which grows with the point, and its slope."""
        parts = [self._loss_of_some(part) for part in self._in_parts(points)]
        return np.concatenate([loss for loss, _ in parts]), np.concatenate([slope for _, slope in parts])

    def _loss_of_some(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        terms = self._logarithms + points[:, np.newaxis] * self._shifts - self._shifts**2 / 2
        largest = terms.max(axis=1, keepdims=True)
        weights = np.exp(terms - largest)
        total = weights.sum(axis=1)
        return np.log(total) + largest[:, 0], weights @ self._shifts / total

    def _mean(self, points: np.ndarray, of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns the mean over the mixture's parts of a function of points `[n, 1]` and shifts `[parts]`."""
        shares = np.exp(self._logarithms)
        return np.concatenate([of(part[:, np.newaxis], self._shifts) @ shares for part in self._in_parts(points)])

    def _in_parts(self, points: np.ndarray) -> list[np.ndarray]:
        return np.array_split(points, 1 + len(points) * len(self._shifts) // _BLOCK)

    def _points(self, losses: np.ndarray) -> np.ndarray:
        """Finds the points of these losses. The hockey stick is stationary there, so that errors hardly count."""
        guesses = np.linspace(self._low, self._high, _GUESSES)
        points = np.interp(losses, self._loss(guesses)[0], guesses)
        for _ in range(_NEWTON_STEPS):
            found, slope = self._loss(points)
            step = (losses - found) / np.maximum(slope, 1e-300)
            points = np.clip(points + np.clip(step, -1.0, 1.0), self._low, self._high)
        return points


def _dominating(hockey_stick, loss_range: tuple[float, ...], discretisation: float) -> pld_pmf.PLDPmf:
    """Makes a distribution on the grid whose hockey stick is nowhere below the given one, which lines approximate.

    Source: Doroshenko et al., "Connect the dots", PETS 2022, algorithm 1.
    """
    first, last = int(np.floor(loss_range[0] / discretisation)), int(np.ceil(loss_range[1] / discretisation))
    losses = np.arange(first, last + 1) * discretisation
    # Rounding must not make the hockey stick rise, or leave [0, 1].
    values = np.clip(hockey_stick(losses), 0.0, 1.0)
    values = np.maximum.accumulate(values[::-1])[::-1]
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(discretisation, first, last, values)
