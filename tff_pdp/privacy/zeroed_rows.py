"""The privacy loss of rows that are sampled together, against the same rows zeroed: a mixture of Gaussians.

Of S rows, a Poisson batch with rate q has rho with probability Binomial(S, q)(rho), and their clipped gradients move
the sum by at most rho C. Against the sum in which these rows count for nothing, the pair

    sum over rho of Binomial(S, q)(rho) Normal(rho, z^2)    and    Normal(0, z^2)

dominates the true one, whatever directions the gradients have, also where later steps depend on earlier ones.

Source: Choquette-Choo, Ganesh, Steinke and Thakurta, "Privacy amplification for matrix mechanisms", ICLR 2024, section
4 (mixtures of vectors are dominated by those of their norms); Charles et al., "Fine-tuning large language models with
user-level differential privacy", 2024 (the same mixture, for a user's examples).
"""

from collections.abc import Callable

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import special, stats

# Of x, in standard deviations: what lies beyond counts as an infinite loss, as do losses beyond the largest.
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
    """The privacy loss distribution of one step, in both directions, above the true one; None for too little noise.

    Args:
      noise_multiplier: z.
      sampling_rate: q, in (0, 1].
      num_rows: S, at least 1.
      discretisation: width of the grid of losses.
    """
    mixture = _Mixture(noise_multiplier, sampling_rate, num_rows)
    if mixture.is_hopeless:
        return None
    return privacy_loss_distribution.PrivacyLossDistribution(
        _dominating(mixture.zeroed, mixture.loss_range, discretisation),
        _dominating(mixture.unzeroed, tuple(-loss for loss in reversed(mixture.loss_range)), discretisation),
    )


def width_and_mean_of_losses(noise_multiplier: float, sampling_rate: float, num_rows: int) -> tuple[float, float]:
    """How far the smallest and the largest loss that such a distribution covers are apart, and roughly their mean."""
    mixture = _Mixture(noise_multiplier, sampling_rate, num_rows)
    return mixture.loss_range[1] - mixture.loss_range[0], mixture.mean_loss()


class _Mixture:
    """The pair of distributions, and how much larger one is than a multiple of the other."""

    def __init__(self, noise_multiplier: float, sampling_rate: float, num_rows: int):
        with np.errstate(divide="ignore"):
            logarithms = stats.binom.logpmf(np.arange(num_rows + 1), num_rows, sampling_rate)
        likely = logarithms > -700
        self._shifts = np.flatnonzero(likely) / noise_multiplier
        # Their own rounding must not look like a difference between the two.
        self._logarithms = logarithms[likely] - special.logsumexp(logarithms[likely])
        self._low, self._high = self._shifts[0] - _TAIL, self._shifts[-1] + _TAIL
        (low, high), _ = self._loss(np.array([self._low, self._high]))
        self.loss_range = (max(float(low), -_LARGEST_LOSS), min(float(high), _LARGEST_LOSS))
        # Nearly everything is beyond what is looked at.
        self.is_hopeless = low >= _LARGEST_LOSS or high <= -_LARGEST_LOSS

    def mean_loss(self) -> float:
        """Of the mixture against the Gaussian around zero, by numerical integration."""
        points = np.linspace(self._low, self._high, _GUESSES)
        density = self._mean(points, lambda x, shifts: stats.norm.pdf(x - shifts))
        return float(np.sum(density * self._loss(points)[0]) * (points[1] - points[0]))

    def zeroed(self, losses: np.ndarray) -> np.ndarray:
        """How much of the mixture exceeds exp(loss) times the Gaussian around zero, at each loss: the hockey stick."""
        points = self._points(losses)
        return self._mean(points, lambda x, shifts: special.ndtr(shifts - x)) - np.exp(losses) * special.ndtr(-points)

    def unzeroed(self, losses: np.ndarray) -> np.ndarray:
        """How much of the Gaussian around zero exceeds exp(loss) times the mixture, at each loss."""
        points = self._points(-losses)
        return special.ndtr(points) - np.exp(losses) * self._mean(points, lambda x, shifts: special.ndtr(x - shifts))

    def _loss(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ln(mixture / Gaussian around zero), which grows with the point, and its slope."""
        parts = [self._loss_of_some(part) for part in self._in_parts(points)]
        return np.concatenate([loss for loss, _ in parts]), np.concatenate([slope for _, slope in parts])

    def _loss_of_some(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        terms = self._logarithms + points[:, np.newaxis] * self._shifts - self._shifts**2 / 2
        largest = terms.max(axis=1, keepdims=True)
        weights = np.exp(terms - largest)
        total = weights.sum(axis=1)
        return np.log(total) + largest[:, 0], weights @ self._shifts / total

    def _mean(self, points: np.ndarray, of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """The mean over the mixture's parts of a function of points `[n, 1]` and shifts `[parts]`."""
        shares = np.exp(self._logarithms)
        return np.concatenate([of(part[:, np.newaxis], self._shifts) @ shares for part in self._in_parts(points)])

    def _in_parts(self, points: np.ndarray) -> list[np.ndarray]:
        return np.array_split(points, 1 + len(points) * len(self._shifts) // _BLOCK)

    def _points(self, losses: np.ndarray) -> np.ndarray:
        """Where the loss has these values. The hockey stick is stationary there, so that errors hardly count."""
        guesses = np.linspace(self._low, self._high, _GUESSES)
        points = np.interp(losses, self._loss(guesses)[0], guesses)
        for _ in range(_NEWTON_STEPS):
            found, slope = self._loss(points)
            step = (losses - found) / np.maximum(slope, 1e-300)
            points = np.clip(points + np.clip(step, -1.0, 1.0), self._low, self._high)
        return points


def _dominating(hockey_stick, loss_range: tuple[float, ...], discretisation: float) -> pld_pmf.PLDPmf:
    """A distribution on the grid whose hockey stick is nowhere below: lines between its values on the grid.

    Source: Doroshenko et al., "Connect the dots", PETS 2022, algorithm 1.
    """
    first, last = int(np.floor(loss_range[0] / discretisation)), int(np.ceil(loss_range[1] / discretisation))
    losses = np.arange(first, last + 1) * discretisation
    # Rounding must not make it rise, or leave [0, 1].
    values = np.clip(hockey_stick(losses), 0.0, 1.0)
    values = np.maximum.accumulate(values[::-1])[::-1]
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(discretisation, first, last, values)
