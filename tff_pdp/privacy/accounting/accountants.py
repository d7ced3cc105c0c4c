"""Computes the epsilon of a run's steps and, conversely, the noise that a budget needs.

A `dp_accounting.DpEvent` says what was released (for instance 500 Poisson-sampled Gaussian sums). Three bounds turn it
into epsilon at a given delta: Renyi differential privacy (RDP), privacy loss distributions (PLD) and, for Gaussian sums
without sampling, the exact formula. Each is an upper bound, so the smallest may be claimed.

Epsilon can also be bounded through a third data set, in which the rows that differ between two neighbours are zeroed.
Let both neighbours be (e, d)-indistinguishable from the third data set. An outcome that has probability p under one
neighbour then has at most probability exp(e) p + d under the third data set, and at most exp(e) (exp(e) p + d) + d
under the other neighbour. The two neighbours are therefore (2 e, (1 + exp(e)) d)-indistinguishable.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import optimize, special

from tff_pdp.errors import BudgetError
from tff_pdp.privacy.accounting.events import (
    CustomDpEvent,
    PldAccountant,
    RdpAccountant,
    flatten_event,
    poisson_gaussian_event,
    releases_without_noise,
    require,
)
from tff_pdp.privacy.accounting.grid_distance import with_grid_noise
from tff_pdp.privacy.accounting.kept import kept

SMALLEST_NOISE_MULTIPLIER = 0.05
LARGEST_NOISE_MULTIPLIER = 1e4

# Below this delta the rounding noise of the Fourier transforms inside PLD composition could hide real privacy loss.
_SMALLEST_PLD_DELTA = 1e-10
# A coarser grid belongs to an epsilon of a million and more; PLD takes exp of the cell width, which overflows at 710.
_COARSEST_PLD_GRID = 100.0
# dp_accounting rejects orders up to 1.01.
_ORDERS = (1.0102, *rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
# Enough to search with, at a sixth of the time, where privacy loss distributions give the smaller bound.
_FEW_ORDERS = _ORDERS[::6]
# Factor by which the grid of a search's first part is coarser.
_COARSENING = 20.0
# Steps of a noise multiplier's logarithm: to measure the slope, and the longest that is trusted to end near the root.
_SLOPE_STEP, _LONGEST_STEP = 4e-3, 1e-2
# The share of its budget by which epsilon may stay below it.
_SLACK = 2.5e-5
# At large epsilon the best order lies close to 1, where the grid of orders is too coarse.
_LARGEST_REFINED_ORDER = 4.0


class Adjacency(enum.Enum):
    """The neighbouring relation: the difference between two data sets that the guarantee hides.

    ADD_OR_REMOVE_ONE: one record (or user) is present or absent; a clipped sum moves by up to the clip norm C.
    REPLACE_ONE: a record's values change; a clipped sum moves by up to 2 C, so events have half the noise multiplier.
    REPLACE_SPECIAL: one record becomes a record that contributes zero; a clipped sum moves by up to C.
    """

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
    REPLACE_SPECIAL = "replace_special"

    @property
    def relation(self) -> dp_accounting.NeighboringRelation:
        """The constant of dp_accounting for this relation."""
        return dp_accounting.NeighboringRelation[self.name]


@dataclasses.dataclass(frozen=True)
class EpsilonBounds:
    """Upper bounds on epsilon at one delta; a bound is None if its method does not support the events.

    Attributes:
      rdp: bound from Renyi differential privacy.
      pld: bound from privacy loss distributions.
      best: the smallest available bound, which may be claimed.
      exact: the exact epsilon if all releases are Gaussian sums without sampling, else None.
    """

    rdp: float | None
    pld: float | None
    best: float
    exact: float | None = None


def epsilon_bounds(
    event: dp_accounting.DpEvent,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    discretisation: float | None = None,
) -> EpsilonBounds:
    """Bounds the joint epsilon of all releases in `event`.

    Guarantee: the mechanisms in `event` are jointly (epsilon, delta)-DP for the epsilon `best` of the result, even if
    later mechanisms depend on earlier outputs.
    Assumes: each event describes its mechanism for the given adjacency, and every parameter was fixed in advance or
    from public data. Noise is ideal, or a `GridNoiseDpEvent` in `event` charges for the distance of the drawn noise
    from ideal noise. Noise multipliers below `events.NOISE_FLOOR` (1e-3) count as no noise: bounds are infinite.

    Args:
      event: the releases.
      delta: delta of (epsilon, delta)-DP, in (0, 1), well below 1 / number of records.
      adjacency: the neighbouring relation; dp_accounting supports Poisson sampling only under ADD_OR_REMOVE_ONE.
      discretisation: cell width of the PLD grid, in units of privacy loss; None for a width that suits epsilon's size.

    Raises:
      ConfigError: delta is not in (0, 1).
      BudgetError: no accountant supports the event under this adjacency.

    >>> round(epsilon_bounds(poisson_gaussian_event(0.01, 1.0, 1000), delta=1e-5).rdp, 3)
    2.101
    """
    require(0 < delta < 1, "delta", delta, "strictly between 0 and 1")
    return _bounds_of_parts(flatten_event(event), delta, adjacency, discretisation)


def quick_epsilon(event: dp_accounting.DpEvent, delta: float, adjacency: Adjacency) -> float:
    """Bounds the joint epsilon of all releases in `event` in about a millisecond, by Renyi divergences at few orders.

    Guarantee, Assumes, Raises: as in `epsilon_bounds`; the result is seldom as small as the best bound there.

    >>> event = poisson_gaussian_event(0.01, 1.0, 1000)
    >>> epsilon_bounds(event, 1e-5).best < quick_epsilon(event, 1e-5, Adjacency.ADD_OR_REMOVE_ONE) < 2.3
    True
    """
    require(0 < delta < 1, "delta", delta, "strictly between 0 and 1")
    rough = functools.partial(_rough_epsilon, adjacency=adjacency)
    bound, more = with_grid_noise(flatten_event(event), delta, rough, rough)
    return bound + more


@kept(float, float)
def _draft_epsilon(parts: tuple, delta: float, adjacency: Adjacency, coarsening: float) -> float:
    """Bounds epsilon in less time than the best bound takes; without coarsening, seldom above the best bound."""
    rough = functools.partial(_rough_epsilon, adjacency=adjacency)
    ideal = functools.partial(_ideal_draft, adjacency=adjacency, coarsening=coarsening)
    draft, more = with_grid_noise(parts, delta, rough, ideal)
    return draft + more


def _ideal_draft(parts: tuple, delta: float, adjacency: Adjacency, coarsening: float) -> float:
    if parts and not any(releases_without_noise(event) for event, _ in parts):
        rdp = _rdp_epsilon(parts, delta, adjacency, _FEW_ORDERS)
        pld = _pld_epsilon(parts, delta, adjacency, coarsening * _pld_grid(parts, rdp), is_draft=coarsening > 1)
        if pld is not None and rdp is not None and pld < 0.99 * rdp:
            return pld
    return _ideal_bounds(parts, delta, adjacency, None).best


def _rough_epsilon(parts: tuple, delta: float, adjacency: Adjacency) -> float:
    """Bounds epsilon in little time, where Renyi divergences are known."""
    if not parts:
        return 0.0
    if any(releases_without_noise(event) for event, _ in parts):
        return math.inf
    rdp = _rdp_epsilon(parts, delta, adjacency, _FEW_ORDERS)
    return _ideal_bounds(parts, delta, adjacency, None).best if rdp is None else rdp


@kept(dataclasses.asdict, lambda stored: EpsilonBounds(**stored))
def _bounds_of_parts(parts: tuple, delta: float, adjacency: Adjacency, discretisation: float | None) -> EpsilonBounds:
    rough = functools.partial(_rough_epsilon, adjacency=adjacency)
    ideal = functools.partial(_ideal_bounds, adjacency=adjacency, discretisation=discretisation)
    bounds, more = with_grid_noise(parts, delta, rough, ideal)
    rdp, pld, exact = (None if bound is None else bound + more for bound in (bounds.rdp, bounds.pld, bounds.exact))
    return EpsilonBounds(rdp, pld, bounds.best + more, exact)


@functools.lru_cache(maxsize=4096)
def _ideal_bounds(parts: tuple, delta: float, adjacency: Adjacency, discretisation: float | None) -> EpsilonBounds:
    if not parts:
        return EpsilonBounds(0.0, 0.0, 0.0, 0.0)
    if any(releases_without_noise(event) for event, _ in parts):
        return EpsilonBounds(math.inf, math.inf, math.inf)
    rdp = _rdp_epsilon(parts, delta, adjacency)
    pld = _pld_epsilon(parts, delta, adjacency, discretisation or _pld_grid(parts, rdp))
    exact = None
    if all(isinstance(event, dp_accounting.GaussianDpEvent) for event, _ in parts):
        precision = sum(count / event.noise_multiplier**2 for event, count in parts)
        exact = exact_gaussian_epsilon(precision**-0.5, delta)
    available = [bound for bound in (rdp, pld, exact) if bound is not None]
    if not available:
        names = sorted({type(event).__name__ for event, _ in parts})
        raise BudgetError(
            f"No accountant supports {', '.join(names)} under {adjacency.value} adjacency at delta={delta:g}. "
            "Poisson sampling needs add_or_remove_one, fixed-size batches replace_one, trees replace_special."
        )
    return EpsilonBounds(rdp, pld, min(available), exact)


def exact_gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Computes epsilon of one unsampled Gaussian sum. T sums cost as much as one sum with `noise_multiplier / sqrt(T)`.

    Source: Balle and Wang, "Improving the Gaussian mechanism for differential privacy", 2018, theorem 8.

    >>> round(exact_gaussian_epsilon(3.7306, 1e-5), 4)
    1.0
    """
    half_shift = 1 / (2 * noise_multiplier)

    def delta_gap(epsilon: float) -> float:
        shift = epsilon * noise_multiplier
        tail = math.exp(min(0.0, epsilon + float(special.log_ndtr(-half_shift - shift))))
        return float(special.ndtr(half_shift - shift)) - tail - delta

    if delta_gap(0.0) <= 0:
        return 0.0
    # Concentrated DP (rho = 1 / (2 z^2)) gives a bracket that is always wide enough.
    ceiling = 2 * half_shift**2 + math.sqrt(2 * math.log(1 / delta)) / noise_multiplier
    return _root(delta_gap, 0.0, ceiling, tolerance=1e-12) * (1 + 1e-9)


def calibrate_noise_multiplier(
    epsilon: float, delta: float, sampling_rate: float, steps: int, fixed_events: Iterable[dp_accounting.DpEvent] = ()
) -> float:
    """Finds the smallest noise multiplier (float32, relative error 2e-5) with which the planned steps fit the budget.

    Guarantee: with the returned noise multiplier, the best bound of all planned steps plus `fixed_events` is at most
    `epsilon`, as the function checks.
    Assumes: as in `poisson_gaussian_event`, under adding or removing one record; at most `steps` steps are run.

    Args:
      epsilon: the budget; for an infinite budget, which needs no noise, 0 is returned.
      delta: delta of (epsilon, delta)-DP, in (0, 1).
      sampling_rate: probability that one record takes part in one step.
      steps: planned number of noisy sums.
      fixed_events: other releases about the same records, such as a private selection or private statistics.

    Raises:
      BudgetError: no noise multiplier up to 1e4 meets the budget.
      ConfigError: a value is out of range.

    >>> round(calibrate_noise_multiplier(epsilon=1.0, delta=1e-5, sampling_rate=1.0, steps=1), 3)
    3.731
    """
    require(0 < delta < 1, "delta", delta, "strictly between 0 and 1")
    poisson_gaussian_event(sampling_rate, 1.0, steps)  # Checks both.
    fixed = list(fixed_events)
    return solve_noise_multiplier(
        lambda z: dp_accounting.ComposedDpEvent([*fixed, poisson_gaussian_event(sampling_rate, z, steps)]),
        epsilon,
        delta,
        guess=guess_of_poisson(epsilon, delta, sampling_rate, steps),
    )


def guess_of_poisson(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """Guesses the noise multiplier that `steps` Poisson-sampled sums need, as the start of a search."""
    spread = sampling_rate * math.sqrt(2 * max(steps, 1) * math.log(1 / min(max(delta, 1e-300), 0.9)))
    return spread / epsilon if epsilon > 0 else 1.0


def next_float32(value: float) -> float:
    """Rounds a value up to a float32, the precision of noise scales."""
    rounded = np.float32(value)
    return float(rounded if rounded >= value else np.nextafter(rounded, np.float32(np.inf)))


def solve_noise_multiplier(
    make_event: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    guess: float = 1.0,
) -> float:
    """Finds the smallest noise multiplier within a budget, for events whose epsilon falls as the multiplier grows.

    Guarantee, Raises: as in `calibrate_noise_multiplier`. The search begins at `guess`.
    """
    if not epsilon > 0:
        raise BudgetError(f"The privacy budget epsilon={epsilon:g} must be above 0: every release costs some epsilon.")
    if math.isinf(epsilon):
        return 0.0
    # A hair below the budget, so that composing the same events in another order cannot round above it.
    target = epsilon * (1 - 1e-6)

    def excess(bound: Callable[[dp_accounting.DpEvent], float], log_noise: float) -> float:
        # The float32 that noise is scaled by.
        best = bound(make_event(next_float32(math.exp(log_noise))))
        return math.log(max(best, 1e-12) / target) if math.isfinite(best) else 700.0

    def draft(event: dp_accounting.DpEvent, coarsening: float = 1.0) -> float:
        return _draft_epsilon(flatten_event(event), delta, adjacency, coarsening)

    floor, ceiling = math.log(SMALLEST_NOISE_MULTIPLIER), math.log(LARGEST_NOISE_MULTIPLIER)
    start = min(max(math.log(max(guess, 0.3)), floor), ceiling)
    coarse = functools.partial(excess, functools.partial(draft, coarsening=_COARSENING))
    best = functools.partial(excess, lambda event: epsilon_bounds(event, delta, adjacency).best)
    found = _from_coarse_to_fine(coarse, best, *_bracket(coarse, start))
    if found is None:
        fine = functools.partial(excess, draft)
        low, high = _bracket(fine, start)
        if high == floor:
            return SMALLEST_NOISE_MULTIPLIER
        if low == ceiling:
            least = epsilon_bounds(make_event(LARGEST_NOISE_MULTIPLIER), delta, adjacency).best
            raise BudgetError(
                f"No noise multiplier up to {LARGEST_NOISE_MULTIPLIER:g} meets epsilon={epsilon:g} at delta={delta:g}: "
                f"with that much noise the plan still costs {least:.4g}, from the events whose noise is fixed (such as "
                "a private selection) or from very many steps. Raise epsilon, run fewer rounds, sample fewer records "
                "per step, or spend less on the fixed events."
            )
        found = _root(fine, low, high, tolerance=1e-5)
    # The reported bound has to hold; the search's bound may differ from it by some millionths.
    step = 1e-5
    while best(found) > 0:
        found, step = found + step, 2 * step
    return next_float32(math.exp(found))


def _bracket(excess: Callable[[float], float], start: float) -> tuple[float, float]:
    """Finds two logarithms of noise multipliers around a root; where there is none, one end of the range twice."""
    floor, ceiling = math.log(SMALLEST_NOISE_MULTIPLIER), math.log(LARGEST_NOISE_MULTIPLIER)
    low = high = start
    while excess(high) > 0:
        if high >= ceiling:
            return ceiling, ceiling
        low, high = high, min(high + math.log(2), ceiling)
    while excess(low) <= 0:
        if low <= floor:
            return floor, floor
        low, high = max(low - math.log(2), floor), low
    return low, high


def _from_coarse_to_fine(
    coarse: Callable[[float], float], fine: Callable[[float], float], low: float, high: float
) -> float | None:
    """Finds the root on the fine grid, mostly by one step from the root on the coarse grid, which costs a tenth.

    Args:
      coarse: excess on the coarse grid, as a function of the logarithm of a noise multiplier.
      fine: excess on the fine grid.
      low: logarithm below the coarse root.
      high: logarithm above the coarse root.

    Returns:
      A little more than the root, so that one evaluation confirms it; None where the two roots are not close.
    """
    if low == high:
        return None
    root = _root(coarse, low, high, tolerance=1e-4)
    slope = (coarse(root + _SLOPE_STEP) - coarse(root - _SLOPE_STEP)) / (2 * _SLOPE_STEP)
    # Excesses fall about as fast as the noise multiplier grows. The rest is noise of the coarse grid.
    before = fine(root)
    step = 5e-6 - before / slope if slope < -0.1 else math.inf
    if abs(step) > _LONGEST_STEP:
        return None
    after = fine(root + step)
    if -_SLACK <= after <= 0:
        return root + step
    if after == before:
        return None
    # Where the best bound changes from one kind to another, the coarse grid's slope misleads, and so may this slope.
    found = root + step - after * step / (after - before) + 5e-6
    return found if abs(found - root) < _LONGEST_STEP and abs(fine(found)) < 4 * _SLACK else None


def _root(gap: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    return float(optimize.brentq(gap, low, high, xtol=tolerance))  # pyright: ignore[reportArgumentType]


@functools.lru_cache(maxsize=4096)
def _rdp_curve(event: dp_accounting.DpEvent, adjacency: Adjacency, orders: tuple[float, ...]) -> np.ndarray | None:
    accountant = RdpAccountant(orders, adjacency.relation)
    if not accountant.supports(event):
        return None
    return accountant.compose(event).rdp


def _rdp_epsilon(parts: tuple, delta: float, adjacency: Adjacency, orders: tuple[float, ...] = _ORDERS) -> float | None:
    best, refines = math.inf, orders == _ORDERS
    for _ in range(4):
        total = np.zeros(len(orders))
        for event, count in parts:
            curve = _rdp_curve(event, adjacency, orders)
            if curve is None:
                return None
            total += count * curve
        epsilon, order = rdp_privacy_accountant.compute_epsilon(orders, total, delta)  # pyright: ignore[reportArgumentType]
        best = min(best, float(epsilon))
        if order > _LARGEST_REFINED_ORDER or not refines:
            break
        orders = _orders_around(orders, orders.index(order))
    return best


def _orders_around(orders: tuple[float, ...], index: int) -> tuple[float, ...]:
    """Makes a grid between the neighbours of one order, whose distances from 1 have equal ratios."""
    low, high = orders[max(index - 1, 0)], orders[min(index + 1, len(orders) - 1)]
    return tuple(1 + np.geomspace(low - 1, high - 1, 12))


def _pld_epsilon(
    parts: tuple, delta: float, adjacency: Adjacency, discretisation: float, *, is_draft: bool = False
) -> float | None:
    accountant = PldAccountant(adjacency.relation, discretisation)
    if delta < _SMALLEST_PLD_DELTA or discretisation > _COARSEST_PLD_GRID:
        return None
    if all(isinstance(event, CustomDpEvent) and event.is_through_zeros for event, _ in parts):
        return epsilon_through_zeros(parts, delta, passes=1 if is_draft else 2)
    if not all(accountant.supports(event) for event, _ in parts):
        return None
    for event, count in parts:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _pld_grid(parts: tuple, rdp: float | None) -> float:
    """Chooses a cell width: the answer has some 1e4 cells, or fewer where one step alone would need millions."""
    smallest = min(getattr(getattr(event, "event", event), "noise_multiplier", 1.0) for event, _ in parts)
    one_step = 1 / (2 * smallest**2) + 10 / smallest
    answer = 10.0 if rdp is None else rdp
    return max(1e-5, answer * 1e-4, one_step * 1e-6)


# The grid of losses: its width at first, later its width as a share of the answer, and the most cells it may have.
_ROUGH, _FINEST_SHARE, _MOST_CELLS = 1e-2, 5e-4, 200_000
_HOPELESS = 3.0


def epsilon_through_zeros(parts: Iterable[tuple[CustomDpEvent, int]], delta: float, passes: int = 2) -> float | None:
    """Bounds the joint epsilon of events that have a `zeroed_pld`, each released several times.

    Guarantee: all releases together are (epsilon, delta)-DP for neighbours that become equal when the rows that may
      differ are zeroed.
    Assumes: the assumptions of each event hold; floating-point noise is treated as real-valued.

    Args:
      parts: pairs of an event and the number of times that it is released.
      delta: delta of (epsilon, delta)-DP, in (0, 1).
      passes: number of loss grids to try, 1 or 2; the second grid is finer than the first.

    Returns:
      The bound on epsilon; None if the noise is too small, or too many rows differ, for this method.
    """
    parts = list(parts)
    shapes = [event.zeroed_width_and_mean for event, _ in parts]
    # The mean loss is far beyond any bound that could be shown: composition would take long and find none.
    lost = sum(count * mean for (_, count), (_, mean) in zip(parts, shapes, strict=True))
    if lost > _HOPELESS * math.log(delta / _SMALLEST_PLD_DELTA):
        return None
    finest = max(width for width, _ in shapes) / _MOST_CELLS
    found = None
    width = _ROUGH
    for _ in range(passes):
        epsilon = _epsilon(parts, delta, max(width, finest))
        found = epsilon if found is None else min(found, found if epsilon is None else epsilon)
        width = _ROUGH / 10 if found is None else min(_ROUGH / 5, _FINEST_SHARE * found)
    return found


def _epsilon(parts: list[tuple[CustomDpEvent, int]], delta: float, discretisation: float) -> float | None:
    total: Any = None
    for event, count in parts:
        loss = event.zeroed_pld(discretisation)
        # With little noise, much of the loss is beyond what the distribution covers.
        if loss is None or count * float(loss.get_delta_for_epsilon(math.inf)) > delta:
            return None
        composed = loss.self_compose(count)
        total = composed if total is None else total.compose(composed)

    low, high = 0.0, math.log(delta / _SMALLEST_PLD_DELTA)
    # Four times, each in a sixty-third of the range before.
    for _ in range(4):
        halves = np.linspace(low, high, 64)
        fits = np.asarray(total.get_delta_for_epsilon(halves)) * (1 + np.exp(halves)) <= delta
        if not fits.any():
            return None
        first = int(np.argmax(fits))
        low, high = halves[max(first - 1, 0)], halves[first]
    return 2 * float(high)
