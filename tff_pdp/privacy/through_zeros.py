"""Epsilon of neighbours by way of data in which what differs between them counts for nothing.

If each of two mechanisms is (e, d)-indistinguishable from a third, the probability of anything under one of them is at
most exp(e) (exp(e) p + d) + d where it is p under the other: they are (2 e, (1 + exp(e)) d)-indistinguishable.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tff_pdp.privacy.accounting.events import CustomDpEvent

# Widths of the grid of losses: first a rough one, then one that the answer asks for, of at most so many cells.
_ROUGH, _FINEST_SHARE, _MOST_CELLS = 1e-2, 5e-4, 200_000
_HOPELESS = 3.0


def epsilon_through_zeros(parts: Iterable[tuple[CustomDpEvent, int]], delta: float, least_delta: float) -> float | None:
    """An upper bound on epsilon for events with a `zeroed_pld`, released so many times each.

    Guarantee: everything together is (epsilon, delta)-DP for neighbours that both are one event's zeroed data away from
      the same third data set.
    Assumes: as the events; floating-point noise is treated as real-valued.

    Args:
      parts: events, and how often.
      delta: in (0, 1).
      least_delta: below which rounding hides losses, so that no smaller one is asked for.

    Returns:
      None where this way gives no bound: too little noise, or too many rows.
    """
    parts = list(parts)
    shapes = [event.zeroed_width_and_mean for event, _ in parts]
    # What is lost on average is far more than can be shown to be little: composing it would take long for nothing.
    lost = sum(count * mean for (_, count), (_, mean) in zip(parts, shapes, strict=True))
    if lost > _HOPELESS * math.log(delta / least_delta):
        return None
    finest = max(width for width, _ in shapes) / _MOST_CELLS
    found = None
    width = _ROUGH
    for _ in range(2):
        epsilon = _epsilon(parts, delta, least_delta, max(width, finest))
        found = epsilon if found is None else min(found, found if epsilon is None else epsilon)
        width = _ROUGH / 10 if found is None else min(_ROUGH / 5, _FINEST_SHARE * found)
    return found


def _epsilon(
    parts: list[tuple[CustomDpEvent, int]], delta: float, least_delta: float, discretisation: float
) -> float | None:
    total = None
    for event, count in parts:
        loss = event.zeroed_pld(discretisation)
        # With little noise, much of the loss is beyond what the distribution covers.
        if loss is None or count * float(loss.get_delta_for_epsilon(math.inf)) > delta:
            return None
        composed = loss.self_compose(count)
        total = composed if total is None else total.compose(composed)
    halves = np.linspace(0.0, math.log(delta / least_delta), 64)
    # Three times, each in a sixty-third of the range before.
    for _ in range(3):
        fits = np.flatnonzero(_fits(total, halves, delta))
        if not len(fits):
            return None
        first = fits[0]
        if first == 0:
            break
        halves = np.linspace(halves[first - 1], halves[first], 64)
    return 2 * float(halves[np.flatnonzero(_fits(total, halves, delta))[0]])


def _fits(loss: Any, halves: np.ndarray, delta: float) -> np.ndarray:
    return np.asarray(loss.get_delta_for_epsilon(halves)) * (1 + np.exp(halves)) <= delta
