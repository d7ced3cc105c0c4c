"""Builds and stores events (`dp_accounting.DpEvent`), which describe releases; defines events that dp_accounting lacks.

Events contain neither data nor an adjacency; `tff_pdp.privacy.accounting.accountants` bounds the epsilon of events.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attr
import dp_accounting
import numpy as np
from dp_accounting import dp_event, pld, rdp
from dp_accounting.pld import pld_pmf, privacy_loss_distribution, privacy_loss_mechanism
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import special

from tff_pdp.errors import ConfigError

# Less noise than this protects nothing (one sum costs epsilon of some 5e5), and the accountants' arithmetic overflows.
NOISE_FLOOR = 1e-3

# Above the error by which rounding makes one Renyi divergence times (order - 1) too small.
_CANCELLATION = 1e-14

# Number of terms of a series that are computed at once, and the logarithm of a term at which a series ends.
_TERMS, _SMALLEST_TERM = 64, -30


class CustomDpEvent(dp_accounting.DpEvent):
    """Base class of events that dp_accounting lacks; subclasses are decorated by `attr.s(frozen=True, slots=True)`."""

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Bounds the Renyi divergence of one application of the mechanism at each order."""
        raise NotImplementedError

    def pld(self, discretisation: float) -> privacy_loss_distribution.PrivacyLossDistribution | None:
        """Returns a privacy loss distribution that dominates one application of the mechanism, None if unknown."""
        return None

    # Whether `zeroed_pld`, in place of `pld`, bounds the privacy loss besides `rdp`.
    is_through_zeros = False

    @property
    def zeroed_width_and_mean(self) -> tuple[float, float]:
        """Difference between the largest and the smallest loss of `zeroed_pld`, and the approximate mean loss."""
        return 0.0, 0.0

    def zeroed_pld(self, discretisation: float) -> privacy_loss_distribution.PrivacyLossDistribution | None:
        """Returns a distribution that dominates one application's privacy loss between a data set and its zeroed form.

        In the zeroed form, the rows that differ between two neighbours contribute zero, so both neighbours have the
        same zeroed form (see `tff_pdp.privacy.accounting.accountants`). None if no such distribution is known.
        """
        return None


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ExponentialMechanismDpEvent(CustomDpEvent):
    """One epsilon-DP choice by the exponential mechanism, or by report-noisy-max with Gumbel noise.

    Epsilon depends on the adjacency: where scores are monotonic, noise that gives epsilon for adding or removing one
    record gives 2 epsilon for replacing one record.

    Do not record the choice as a Gaussian event with an equal concentrated-DP parameter: both have equal RDP bounds,
    but PLD and the exact Gaussian formula would then give too small an epsilon.

    Source: Cesar and Rogers, "Bounding, concentrating, and truncating", 2021 (concentrated DP with rho = epsilon^2/8).
    """

    epsilon: float

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Returns the smaller of rho * order, with rho = epsilon^2 / 8, and epsilon."""
        return np.minimum(self.epsilon**2 / 8 * orders, self.epsilon)

    def pld(self, discretisation: float) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the loss of randomised response with this epsilon, which dominates every epsilon-DP mechanism."""
        parameters = privacy_loss_distribution.common.DifferentialPrivacyParameters(self.epsilon, 0)
        return privacy_loss_distribution.from_privacy_parameters(
            parameters, value_discretization_interval=discretisation
        )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ParameterChoiceDpEvent(CustomDpEvent):
    """One epsilon-DP release that determines parameters of later mechanisms, such as a sampling rate.

    Accountants compose mechanisms whose parameters were fixed in advance. Where a released number n sets parameters,
    the later mechanism differs with n. If n were recorded as a Laplace mechanism's result, the privacy losses of n and
    of the later mechanism could partly cancel: the bound would hold for each single n, but not for all n together. Here
    the loss of the release is always the whole epsilon, so the two epsilons add up. The sum is a bound for every
    dependence on n, provided that for each n the later releases stay within the rest of the budget.

    Source: Dwork and Roth, "The algorithmic foundations of differential privacy", 2014, theorem B.1 (sequential
    composition with a second mechanism that may depend on the outcome of the first).
    """

    epsilon: float

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Returns epsilon at every order."""
        return np.full(np.shape(orders), self.epsilon)

    def pld(self, discretisation: float) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the distribution with all probability at epsilon, the largest possible loss."""
        return privacy_loss_distribution.PrivacyLossDistribution.create_from_rounded_probability(
            {math.ceil(self.epsilon / discretisation): 1.0}, 0.0, discretisation
        )


class GaussianPrivacyLoss(privacy_loss_mechanism.GaussianPrivacyLoss):
    """dp_accounting's privacy loss of a sampled Gaussian, extended to invert all losses of a grid at once.

    Guarantee: results equal dp_accounting's to the bit. dp_accounting inverts losses one by one in Python, which takes
      most of the time that a distribution needs. Here, only losses at or beyond the ends of the range are inverted one
      by one.
    """

    _inverted: Mapping[float, float] = {}

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """Computes the hockey-stick divergence at one epsilon, or at each epsilon of a sequence."""
        losses = np.atleast_1d(np.asarray(epsilon, np.float64))
        self._inverted = dict(zip(losses.tolist(), self._invert(losses).tolist(), strict=True))
        try:
            return super().get_delta_for_epsilon(epsilon)
        finally:
            self._inverted = {}

    def inverse_privacy_loss(self, privacy_loss: float) -> float:
        """Returns the largest x at which the loss is at least `privacy_loss`; overrides dp_accounting's method."""
        inverted = self._inverted.get(float(privacy_loss), math.nan)
        return super().inverse_privacy_loss(privacy_loss) if math.isnan(inverted) else inverted

    def _invert(self, losses: np.ndarray) -> np.ndarray:
        """Inverts each loss, by the library's operations; NaN where the loss is not inside of the range."""
        rate = self.sampling_prob
        if rate == 1.0:
            return np.asarray(self.inverse_privacy_loss_without_subsampling(losses))  # pyright: ignore[reportArgumentType]
        sign = -1.0 if self.adjacency_type == privacy_loss_mechanism.AdjacencyType.ADD else 1.0
        # log(1 + (exp(loss) - 1) / rate), which is the loss without sampling.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scaled = sign * losses + np.log(1 / rate)
            unsampled = scaled + np.log1p(-np.exp(np.log(-(1 - 1 / rate)) - scaled))
        inside = ~np.isclose(sign * losses, math.log(1 - rate), rtol=1e-8, atol=0) & (losses != 0)
        inverted = self.inverse_privacy_loss_without_subsampling(sign * unsampled)  # pyright: ignore[reportArgumentType]
        return np.where(inside & np.isfinite(unsampled), inverted, math.nan)


# The library takes this class where it makes the privacy loss distribution of a Gaussian.
privacy_loss_mechanism.GaussianPrivacyLoss = GaussianPrivacyLoss


def hockey_stick_divergences(
    infinity_mass: float, losses: Sequence[float], probs: Sequence[float], epsilons: Sequence[float]
) -> np.ndarray:
    """Computes a distribution's hockey-stick divergence at each of several epsilons.

    Guarantee: results equal dp_accounting's to the bit. dp_accounting loops over the losses in Python.

    Args:
      infinity_mass: probability that the loss is infinite.
      losses: `[losses]`, ascending.
      probs: `[losses]`, probability of each loss.
      epsilons: `[epsilons]`, ascending.

    Raises:
      ValueError: the epsilons are not in ascending order.
    """
    loss, probability, epsilon = (np.asarray(values, np.float64) for values in (losses, probs, epsilons))
    if np.any(np.diff(epsilon) < 0):
        raise ValueError("The epsilons must be in ascending order.")
    finite = epsilon[~np.isposinf(epsilon)]
    divergences = np.full(len(epsilon), infinity_mass)
    if not len(finite):
        return divergences
    # From the largest loss down, as the library adds them.
    above = np.flatnonzero(loss > finite[0])[::-1]
    upper = np.cumsum(np.concatenate([[infinity_mass], probability[above]]))
    lower = np.cumsum(np.concatenate([[0.0], probability[above] * np.exp(-loss[above])]))
    beyond = len(loss) - np.searchsorted(loss, finite, "right")
    divergences[: len(finite)] = upper[beyond] - np.exp(finite) * lower[beyond]
    return divergences


# The library takes this function where it asks a distribution for its divergences.
pld_pmf._get_delta_for_epsilon_vectorized = hockey_stick_divergences


def sampled_gaussian_rdp(sampling_rate: float, noise_multiplier: float, orders: np.ndarray) -> np.ndarray:
    """Computes the Renyi divergences of one Poisson-sampled Gaussian, many terms of a series at a time.

    Guarantee: results equal dp_accounting's to the bit. dp_accounting computes one term after the other in Python.

    Args:
      sampling_rate: probability q that one record takes part, 0 < q < 1.
      noise_multiplier: noise standard deviation / clip norm, positive.
      orders: `[orders]`, finite and above 1.

    Source: Mironov, Talwar and Zhang, "Renyi differential privacy of the sampled Gaussian mechanism", 2019, sections
      3.3 (whole orders) and 3.4 (other orders).
    """
    series = [_whole_order if float(order).is_integer() else _broken_order for order in orders]
    return np.array(
        [
            log_a(sampling_rate, noise_multiplier, order) / (order - 1)
            for log_a, order in zip(series, orders, strict=True)
        ]
    )


def _sampled_gaussian(event: dp_accounting.DpEvent) -> tuple[float, float] | None:
    """Returns sampling rate and noise multiplier of a Poisson-sampled Gaussian; None for another event."""
    if not isinstance(event, dp_event.PoissonSampledDpEvent) or not isinstance(event.event, dp_event.GaussianDpEvent):
        return None
    rate, noise = event.sampling_probability, event.event.noise_multiplier
    return (rate, noise) if 0 < rate < 1 and noise > 0 else None


def _whole_order(rate: float, noise: float, order: float) -> float:
    index = np.arange(int(order) + 1)
    coefficients = special.gammaln(int(order) + 1) - special.gammaln(index + 1) - special.gammaln(order - index + 1)
    logs = coefficients + index * math.log(rate) + (order - index) * math.log(1 - rate)
    total = -math.inf
    for term in (logs + (index * index - index) / (2 * (noise**2))).tolist():
        total = rdp_privacy_accountant._log_add(total, term)
    return total


def _broken_order(rate: float, noise: float, order: float) -> float:
    """Sums both integrals, below and above the point z0 where the densities with and without the record are equal."""
    log_rate, log_rest, twice_variance = math.log(rate), math.log(1 - rate), 2 * (noise**2)
    equal = noise**2 * math.log(1 / rate - 1) + 0.5
    below = above = -math.inf
    for start in itertools.count(0, _TERMS):
        i = np.arange(start, start + _TERMS, dtype=np.float64)
        j = order - i
        binomials = special.binom(order, i)
        # The logarithms of `math` and NumPy differ in last bits.
        logs = np.array([math.log(abs(binomial)) for binomial in binomials.tolist()])
        tails = [
            math.log(0.5) + (math.log(2) + special.log_ndtr(-(distance / (math.sqrt(2) * noise)) * 2**0.5))
            for distance in (i - equal, equal - j)
        ]
        terms_below = logs + i * log_rate + j * log_rest + (i * i - i) / twice_variance + tails[0]
        terms_above = logs + j * log_rate + i * log_rest + (j * j - j) / twice_variance + tails[1]
        for binomial, lower, upper in zip(binomials.tolist(), terms_below.tolist(), terms_above.tolist(), strict=True):
            add = rdp_privacy_accountant._log_add if binomial > 0 else rdp_privacy_accountant._log_sub
            below, above = add(below, lower), add(above, upper)
            if max(lower, upper) < _SMALLEST_TERM:
                return rdp_privacy_accountant._log_add(below, above)
    raise AssertionError("unreachable")


class RdpAccountant(rdp.RdpAccountant):
    """dp_accounting's RDP accountant, extended to every `CustomDpEvent`; rounds up where terms cancel."""

    def _maybe_compose(self, event, count, do_compose):
        if isinstance(event, CustomDpEvent):
            if do_compose:
                self._rdp = self._rdp + count * event.rdp(self._orders)
            return None
        sampled = _sampled_gaussian(event)
        unsupported = super()._maybe_compose(event, count, do_compose and sampled is None)
        if do_compose and sampled and unsupported is None:
            self._rdp = self._rdp + count * sampled_gaussian_rdp(*sampled, self._orders)
        if do_compose and unsupported is None:
            # log(A) / (order - 1) cancels, and can even turn a tiny divergence negative, which the library then refuses
            # inside of RepeatAndSelectDpEvent.
            self._rdp = np.maximum(self._rdp, 0.0) + count * _CANCELLATION / (self._orders - 1)
        return unsupported


class PldAccountant(pld.PLDAccountant):
    """dp_accounting's PLD accountant, extended to every `CustomDpEvent` that has a privacy loss distribution."""

    def _maybe_compose(self, event, count, do_compose):
        if not isinstance(event, CustomDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        loss = event.pld(self._value_discretization_interval)
        if loss is None:
            return self.CompositionErrorDetails(event, "No privacy loss distribution is known.")
        if do_compose:
            self._pld = self._pld.compose(loss.self_compose(count))
        return None


def poisson_gaussian_event(sampling_rate: float, noise_multiplier: float, steps: int) -> dp_accounting.DpEvent:
    """Builds the event of `steps` noisy sums, each over a fresh Poisson sample.

    Guarantee: the epsilon bounds hold for one record under DP-SGD inside a silo, and for one user under user-level
    averaging.
    Assumes: every record is drawn independently with probability `sampling_rate` in each step (shuffled or fixed-size
    batches are a different event), contributions are clipped jointly to norm C, the noise has standard deviation
    `noise_multiplier * C`, and the sum is divided by a constant rather than by the realised batch size.

    Args:
      sampling_rate: probability in [0, 1] that one record takes part in one step.
      noise_multiplier: noise standard deviation / clip norm; below `NOISE_FLOOR` (1e-3), epsilon counts as infinite.
      steps: number of noisy sums released.

    Raises:
      ConfigError: a value is out of range.
    """
    require(0 <= sampling_rate <= 1, "sampling_rate", sampling_rate, "a probability between 0 and 1")
    event = dp_accounting.GaussianDpEvent(float(noise_multiplier))
    if sampling_rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(float(sampling_rate), event)
    return repeated(event, noise_multiplier, steps, is_empty=sampling_rate == 0)


def repeated(
    event: dp_accounting.DpEvent, noise_multiplier: float, steps: int, *, is_empty: bool
) -> dp_accounting.DpEvent:
    """Builds the event of `steps` releases: none if `is_empty`, releases without privacy if the noise is zero.

    Raises:
      ConfigError: noise multiplier or steps are out of range.
    """
    require(0 <= noise_multiplier < math.inf, "noise_multiplier", noise_multiplier, "zero or positive, and finite")
    require(0 <= steps < math.inf and steps == int(steps), "steps", steps, "a whole number, zero or more")
    if is_empty or steps == 0:
        return dp_accounting.NoOpDpEvent()
    if noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    return event if steps == 1 else dp_accounting.SelfComposedDpEvent(event, int(steps))


def flatten_event(event: dp_accounting.DpEvent) -> tuple[tuple[dp_accounting.DpEvent, int], ...]:
    """Flattens nested compositions to sorted (single event, count) pairs, so that equal histories give equal bounds."""
    counts: Counter[dp_accounting.DpEvent] = Counter()
    pending = [(event, 1)]
    while pending:
        current, count = pending.pop()
        if isinstance(current, dp_accounting.SelfComposedDpEvent):
            pending.append((current.event, current.count * count))
        elif isinstance(current, dp_accounting.ComposedDpEvent):
            pending.extend((part, count) for part in current.events)
        elif count and not isinstance(current, dp_accounting.NoOpDpEvent):
            counts[hashable(current)] += count
    return tuple(sorted(counts.items(), key=repr))


def releases_without_noise(event: dp_accounting.DpEvent) -> bool:
    """Checks if any part of the event has a noise multiplier below `NOISE_FLOOR` or is marked as not private."""
    inner = getattr(event, "event", None)
    if inner is not None:
        return releases_without_noise(inner)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return any(releases_without_noise(part) for part in event.events)
    return isinstance(event, dp_accounting.NonPrivateDpEvent) or getattr(event, "noise_multiplier", 1.0) < NOISE_FLOOR


def event_to_dict(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns an event's class name and numbers, ready for JSON; `event_from_dict` restores the event exactly."""

    def encode(value: Any) -> Any:
        if isinstance(value, dp_event.DpEvent):
            return event_to_dict(value)
        return [encode(part) for part in value] if isinstance(value, list | tuple) else value

    fields = {field.name: encode(getattr(event, field.name)) for field in attr.fields(type(event))}
    return {"name": type(event).__name__, **fields}


def event_from_dict(stored: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """Restores an event that `event_to_dict` wrote.

    Raises:
      ConfigError: no known event has the stored name. A `CustomDpEvent` is known once its module is imported.
    """
    known = {kind.__name__: kind for kind in [*dp_event.DpEvent.__subclasses__(), *CustomDpEvent.__subclasses__()]}
    if stored.get("name") not in known:
        raise ConfigError(f"Stored privacy event has the unknown name {stored.get('name')!r}.")

    def decode(value: Any) -> Any:
        if isinstance(value, Mapping):
            return event_from_dict(value)
        return tuple(decode(part) for part in value) if isinstance(value, list) else value

    return known[stored["name"]](**{key: decode(value) for key, value in stored.items() if key != "name"})


def hashable(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns a copy of an event with tuples in place of lists: attrs hashes each field, and lists are unhashable."""
    changes = {}
    for field in attr.fields(type(event)):
        value = getattr(event, field.name)
        if isinstance(value, dp_event.DpEvent):
            changes[field.name] = hashable(value)
        elif isinstance(value, list | tuple):
            changes[field.name] = tuple(hashable(v) if isinstance(v, dp_event.DpEvent) else v for v in value)
    return attr.evolve(event, **changes)


def require(holds: bool, name: str, value: float, wanted: str) -> None:
    """Raises a ConfigError that names the value, unless `holds` is true."""
    if not holds:
        raise ConfigError(f"{name} is {value!r}; it must be {wanted}.")
