"""When a silo leaves a run: after the last round that its budget pays for, which is known before the first."""

from collections.abc import Iterable

import dp_accounting

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds
from tff_pdp.privacy.accounting.budgets import SiloBudget


def rounds_within_budget(
    budget: SiloBudget,
    round_event: dp_accounting.DpEvent,
    fixed_events: Iterable[dp_accounting.DpEvent],
    rounds: int,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    first: tuple[dp_accounting.DpEvent, int] | None = None,
) -> int:
    """How many rounds a silo takes part in: the most that stay within its budget, of those planned.

    Guarantee: `fixed_events`, that many repetitions of `round_event` and what `first` adds to them are jointly
    (epsilon, delta)-DP with the budget's epsilon and delta; and when the silo leaves is a function of the arguments
    alone, so it reveals nothing about the silo's records. It may reveal the budget.
    Assumes: each event describes its mechanism for the given adjacency, no round releases anything else, and the
    parameters of all events and the budget are public and fixed without looking at the data.

    Args:
      budget: the silo's.
      round_event: what every round releases about the silo.
      fixed_events: what the silo releases besides, once, whether it takes part in any round or not.
      rounds: the planned rounds, at least 0.
      adjacency: the neighbouring relation of all events.
      first: what each of the first rounds releases besides, and how many rounds these are.

    Returns:
      At most `rounds`; 0 where not even one round fits.

    Raises:
      ConfigError: `rounds` is negative or not a whole number.
      BudgetError: no accountant supports the events under this adjacency.

    Source: Liu et al., "Projected federated averaging with heterogeneous differential privacy", VLDB 2021, where a silo
    also stops when its budget is spent, by an asymptotic formula that does not bound epsilon; here accountants do.

    >>> from tff_pdp.privacy.accountants import poisson_gaussian_event
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
    # What a silo has released grows with the rounds, and so does epsilon: bisection finds the last that fits.
    most, too_many = 0, int(rounds)
    while too_many - most > 1:
        middle = (most + too_many) // 2
        if fits(middle):
            most = middle
        else:
            too_many = middle
    return most
