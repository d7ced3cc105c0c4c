"""Finds how many rounds a silo's budget allows, and the noise that two papers' released code chooses.

A silo leaves a run after the last round that fits into its budget; this round is known before the run starts.

The MR-MTL paper's code chooses noise by Renyi differential privacy at few orders, with a loose conversion to epsilon.
Use this noise to compare with published figures. `tff_pdp.privacy.accounting.accountants` bounds the true epsilon of
this noise, which is well below the epsilon that the noise was chosen for. The PFA paper's code chooses noise by an
asymptotic formula, whose epsilon bounds nothing.
"""

import bisect
import decimal
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping

import dp_accounting
import numpy as np
from scipy import optimize

from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import (
    LARGEST_NOISE_MULTIPLIER,
    SMALLEST_NOISE_MULTIPLIER,
    Adjacency,
    epsilon_bounds,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import RdpAccountant, flatten_event, poisson_gaussian_event
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.accounting.kept import side_by_side


def rounds_within_budget(
    budget: SiloBudget,
    round_event: dp_accounting.DpEvent,
    fixed_events: Iterable[dp_accounting.DpEvent],
    rounds: int,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    first: tuple[dp_accounting.DpEvent, int] | None = None,
) -> int:
    """Counts the rounds that a silo takes part in: all planned rounds, or as many as fit into the silo's budget.

    Guarantee: with the returned number of rounds, the releases of all rounds and `fixed_events` are jointly (epsilon,
    delta)-DP with the budget's epsilon and delta. The number is a function of the arguments alone, so it reveals
    nothing about the silo's records. It may reveal the budget.
    Assumes: each event describes its mechanism for the given adjacency, no round releases anything else, and the
    parameters of all events and the budget are public and fixed without looking at the data.

    Args:
      budget: budget of the silo.
      round_event: the releases about the silo in each round.
      fixed_events: the silo's other releases, each made once, even if the silo takes part in no round.
      rounds: number of planned rounds, at least 0.
      adjacency: the neighbouring relation of all events.
      first: `(event, n)`, an additional release that each of the first n rounds makes; None for none.

    Returns:
      At most `rounds`; 0 where not even one round fits.

    Raises:
      ConfigError: `rounds` is negative or not a whole number.
      BudgetError: no accountant supports the events under this adjacency.

    Source: Liu et al., "Projected federated averaging with heterogeneous differential privacy", VLDB 2021. The paper's
    silos also stop when their budgets are spent, but the paper computes the spending by an asymptotic formula, which is
    not an upper bound.

    >>> rounds_within_budget(SiloBudget(1.0, 1e-5), poisson_gaussian_event(1.0, 8.0, 1), [], rounds=100)
    4
    """
    if rounds != int(rounds) or rounds < 0:
        raise ConfigError(f"rounds is {rounds!r}; it must be a whole number, zero or more.")
    fixed = list(fixed_events)

    def fits(count: int) -> bool:
        repeated = [dp_accounting.SelfComposedDpEvent(round_event, count)]
        if first is not None:
            repeated.append(dp_accounting.SelfComposedDpEvent(first[0], min(count, first[1])))
        released = dp_accounting.ComposedDpEvent([*fixed, *repeated])
        return epsilon_bounds(released, budget.delta, adjacency).best <= budget.epsilon

    if rounds == 0 or fits(int(rounds)):
        return int(rounds)
    # Releases grow with the rounds, and so does epsilon: bisection finds the first round that does not fit.
    return bisect.bisect_left(range(1, int(rounds)), True, key=lambda count: not fits(count))


# The orders of the released code.
_ORDERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *map(float, range(5, 64)), 128.0, 256.0, 512.0)
_TOLERANCE = 1e-5
# Digits of true epsilons: the last bits of an accountant's result differ between machines.
_DIGITS = 4
_MARGIN = 1e-4
# The most pairs of label and true epsilon that a warning lists.
_MOST_LISTED = 6


def paper_noise_multiplier(
    epsilon: float, delta: float, sampling_rate: float, steps: int, other_events: Iterable[dp_accounting.DpEvent] = ()
) -> float:
    """Finds the noise multiplier at which `paper_epsilon` equals `epsilon`, which is more noise than the budget needs.

    Args:
      epsilon: the budget; for an infinite budget, which needs no noise, 0 is returned.
      delta: delta of (epsilon, delta)-DP, in (0, 1).
      sampling_rate: probability that one record takes part in one step.
      steps: planned number of noisy sums.
      other_events: other releases of the same silo, such as private selections.

    Raises:
      BudgetError: no noise multiplier up to 1e4 meets the budget.

    Source: Liu et al., "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022, section 4 and
    its released code.

    >>> round(paper_noise_multiplier(6.0, 1e-3, 1.0, 200), 2)
    10.4
    """
    if math.isinf(epsilon):
        return 0.0
    others = flatten_event(dp_accounting.ComposedDpEvent(list(other_events)))
    return _solve(float(epsilon), float(delta), float(sampling_rate), int(steps), others)


def paper_epsilon(
    noise_multiplier: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    others: tuple[tuple[dp_accounting.DpEvent, int], ...] = (),
) -> float:
    """Computes epsilon by the classic RDP conversion: the least `rdp(a) + log(1 / delta) / (a - 1)` over orders a.

    Guarantee: the result is an upper bound; `tff_pdp.privacy.accounting.accountants` gives tighter bounds.
    Assumes: as in `poisson_gaussian_event`.

    Args:
      noise_multiplier: noise standard deviation / clip norm.
      delta: delta of (epsilon, delta)-DP, in (0, 1).
      sampling_rate: probability that one record takes part in one step.
      steps: number of noisy sums.
      others: other releases of the same silo, and the count of each.

    Source: Mironov, "Renyi differential privacy", 2017, proposition 3. The paper does not name its conversion; among
    the conversions that TensorFlow Privacy has had, this one gives the published figures.
    """
    accountant = RdpAccountant(_ORDERS)
    accountant.compose(poisson_gaussian_event(sampling_rate, noise_multiplier, steps))
    for event, count in others:
        accountant.compose(event, count)
    orders = np.array(_ORDERS)
    return float(np.min(accountant.rdp + math.log(1 / delta) / (orders - 1)))


def asymptotic_noise_multiplier(
    epsilon: float, delta: float, sampling_rate: float, steps: int, other_events: Iterable[dp_accounting.DpEvent] = ()
) -> float:
    """Computes the noise multiplier `10 q sqrt(steps * -log10(delta)) / epsilon` of the PFA paper's released code.

    Guarantee: none, because `epsilon` is only a label. The formula has the shape of a bound for many steps and small
    epsilons, but its constant is the authors' choice. In the papers' settings, the true epsilon is between a tenth of
    the label and forty times the label.

    Args:
      epsilon: the label; for an infinite label 0 is returned.
      delta: delta of (epsilon, delta)-DP, in (0, 1).
      sampling_rate: q, probability that one record takes part in one step.
      steps: planned number of noisy sums.
      other_events: other releases of the same silo; the formula has no place for them.

    Source: the released code of Liu et al., "Projected federated averaging with heterogeneous differential privacy",
    VLDB 2021; after Abadi et al., "Deep learning with differential privacy", 2016, theorem 1.

    >>> round(asymptotic_noise_multiplier(1.0, 1e-5, 0.01, 2000), 6)
    10.0
    """
    del other_events
    return 10 * sampling_rate * math.sqrt(steps * -math.log10(delta)) / epsilon


def true_budgets(
    labels: Mapping[str, SiloBudget],
    releases: Mapping[str, Mapping[dp_accounting.DpEvent, int]],
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
) -> dict[str, SiloBudget]:
    """Computes every silo's budget where noise was chosen for labels: the true epsilon, rounded up to four digits.

    Guarantee: all releases of silo k are jointly (epsilon_k, delta_k)-DP with the epsilon and delta of silo k's result.
    Assumes: each event describes its mechanism for the adjacency; noise multipliers and counts are public.

    Args:
      labels: by client id, the label (in place of epsilon) and delta; an infinite label means that no noise is asked
        for.
      releases: by client id, how often each event of the silo is planned; the charge for drawn noise is one of the
        events.
      adjacency: the neighbouring relation of all events.

    Raises:
      BudgetError: no finite epsilon holds for the noise of a finite label.
    """
    events = {client_id: _composed(releases[client_id]) for client_id in labels}
    calls = [functools.partial(epsilon_bounds, events[one], labels[one].delta, adjacency) for one in labels]
    budgets = {}
    for (client_id, label), bounds in zip(labels.items(), side_by_side(calls), strict=True):
        if math.isinf(bounds.best) and math.isfinite(label.epsilon):
            ideal = {one: n for one, n in releases[client_id].items() if not isinstance(one, GridNoiseDpEvent)}
            true = epsilon_bounds(_composed(ideal), label.delta, adjacency).best
            raise BudgetError(
                f"silo {client_id!r}: the noise that privacy.noise_calibration paper_asymptotic chooses for epsilon "
                f"{label.epsilon:g} has a true epsilon of {true:.3g}, too large for any claim: lower the epsilon, or "
                "train with larger batches or fewer steps"
            )
        budgets[client_id] = SiloBudget(_round_up(bounds.best), label.delta)
    return budgets


def label_warning(labels: Mapping[str, float], budgets: Mapping[str, SiloBudget]) -> str:
    """Builds a warning that labels are not epsilons, with the true epsilons of `budgets`; empty without finite labels.

    >>> label_warning({"a": 10.0, "b": 10.0}, dict.fromkeys("ab", SiloBudget(2.8, 1e-5))).rpartition(": ")[2]
    '10 is truly 2.8 (2 silos)'
    """
    pairs = Counter((label, budgets[client_id].epsilon) for client_id, label in labels.items() if math.isfinite(label))
    if not pairs:
        return ""
    listed = [
        f"{label:g} is truly {true:g} ({number} {'silo' if number == 1 else 'silos'})"
        # The largest first: their true epsilons may exceed the labels.
        for (label, true), number in sorted(pairs.items(), reverse=True)[:_MOST_LISTED]
    ]
    more = f", and {len(pairs) - _MOST_LISTED} more" if len(pairs) > _MOST_LISTED else ""
    return (
        "the epsilons of privacy.budgets are labels of an asymptotic formula (paper_asymptotic), not guarantees; the "
        f"ledger has the true epsilons: {', '.join(listed)}{more}"
    )


def _composed(releases: Mapping[dp_accounting.DpEvent, int]) -> dp_accounting.DpEvent:
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(event, count) for event, count in releases.items()]
    )


def _round_up(epsilon: float) -> float:
    """Rounds up to a few digits, with a margin, so that the ledger never finds a planned release over the budget."""
    if math.isinf(epsilon):
        return epsilon
    context = decimal.Context(prec=_DIGITS, rounding=decimal.ROUND_CEILING)
    return float(context.create_decimal_from_float(epsilon * (1 + _MARGIN)))


@functools.lru_cache(maxsize=4096)
def _solve(epsilon: float, delta: float, sampling_rate: float, steps: int, others: tuple) -> float:
    def excess(log_noise: float) -> float:
        return math.log(paper_epsilon(math.exp(log_noise), delta, sampling_rate, steps, others) / epsilon)

    floor, ceiling = math.log(SMALLEST_NOISE_MULTIPLIER), math.log(LARGEST_NOISE_MULTIPLIER)
    # A guess by concentrated differential privacy, whose cost sampling multiplies by about the square of its rate.
    loss = math.sqrt(epsilon + math.log(1 / delta)) - math.sqrt(math.log(1 / delta))
    guess = min(max(math.log(sampling_rate * math.sqrt(steps / 2) / loss), floor), ceiling)
    low, high = guess - 0.1, guess + 0.1
    while excess(high) > 0:
        if high >= ceiling:
            raise BudgetError(
                f"No noise multiplier up to {LARGEST_NOISE_MULTIPLIER:g} meets epsilon={epsilon:g} at delta={delta:g} "
                "by the paper's accounting: other releases cost too much. Raise epsilon, or select clusters in fewer "
                "rounds."
            )
        low, high = high, min(high + 0.7, ceiling)
    while excess(low) <= 0 and low > floor:
        low, high = max(low - 0.7, floor), low
    if excess(low) <= 0:
        return SMALLEST_NOISE_MULTIPLIER
    found = float(optimize.brentq(excess, low, high, xtol=_TOLERANCE))  # pyright: ignore[reportArgumentType]
    return math.exp(found + _TOLERANCE)
