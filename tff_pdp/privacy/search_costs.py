"""What a search for hyper-parameters costs a silo, and what it would cost in other ways."""

import dataclasses

import dp_accounting

from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.accounting.repeated_runs import fixed_grid_event
from tff_pdp.privacy.plans.search import Search
from tff_pdp.privacy.silo_example_plan import SiloExamplePlan


@dataclasses.dataclass(frozen=True)
class SearchCosts:
    """Epsilons of one silo, all at its budget's delta and with the noise of its search.

    Attributes:
      total: of everything on record: the statistics released before training, the pivot run and the search.
      untuned: of one training instead, its hyper-parameters chosen in advance.
      fixed_grid: of a search that tries every candidate once, in place of a random number of them.
    """

    total: float
    untuned: float
    fixed_grid: float


def search_costs(plan: SiloExamplePlan, search: Search, ledger: Ledger) -> dict[str, SearchCosts]:
    """What each silo pays.

    Args:
      plan: of the search.
      search: the plan's.
      ledger: after `plan.charge_search`.

    Returns:
      By client id.
    """
    return {client_id: _costs(plan, search, ledger, client_id) for client_id in plan.budgets}


def _costs(plan: SiloExamplePlan, search: Search, ledger: Ledger, client_id: str) -> SearchCosts:
    before = [event for event, _ in plan.fixed_events.get(client_id, ())]
    training = plan.training_event(client_id)
    run = dp_accounting.ComposedDpEvent([training, search.score_event])
    pivot = [training] if search.has_pivot else []

    def epsilon(*events: dp_accounting.DpEvent) -> float:
        everything = dp_accounting.ComposedDpEvent([*before, *events])
        return epsilon_bounds(everything, plan.budgets[client_id].delta, plan.adjacency).best

    return SearchCosts(
        total=ledger.epsilon(client_id).best,
        untuned=epsilon(training),
        fixed_grid=epsilon(*pivot, fixed_grid_event(run, len(search.candidates))),
    )
