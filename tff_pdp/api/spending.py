"""Builds pandas frames of the privacy that runs have spent, from the runs' own records and from the registry."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from tff_pdp.api.frames import ALGORITHM, CLIENT
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.training.counted import cost_of_all_runs
from tff_pdp.training.record.charges import Charges, read_charges

# Name, among the methods, of the cost of all runs together.
ALL_RUNS = "all runs on record"


def spent_frame(config: ExperimentConfig, names: Sequence[str]) -> pd.DataFrame:
    """Computes the privacy that runs have spent so far, finished or not.

    Guarantee: `epsilon_spent` is at least what the run has spent, because the run's record covers a round before the
      round's noise is drawn.
    Assumes: as in `tff_pdp.training.counted.cost_of_all_runs`.

    Args:
      config: the experiment.
      names: names of the methods.

    Returns:
      One row for each method and scope (a silo, or all users), with the index levels `algorithm` and `client`, and the
      columns `epsilon_budget`, `epsilon_spent`, `epsilon_left` (budget minus spent), `delta` and `why_no_bound`. A
      budget is for one run. The last rows, of the algorithm `all runs on record`, have the composed cost of all runs on
      the same records, in all folders. `epsilon_spent` is infinite where no bound holds; `why_no_bound` has the reason.

    Raises:
      ConfigError: no method has begun training.
      DataError: the record of a run, or the registry, is damaged.
    """
    rows, last = [], None
    for name in names:
        charges = read_charges(config.algorithm_folder(name))
        if charges is None:
            continue
        # Silos have made their releases before training, so that this call releases nothing.
        method = last = build_method(config, name)
        rows += [{ALGORITHM: name, **row} for row in _rows_of_run(method, charges)]
    if last is None:
        raise ConfigError("nothing is spent yet, because no method has begun training: call train() first")
    rows += [
        {ALGORITHM: ALL_RUNS, CLIENT: scope, **_spent(cost.epsilon, cost.delta, cost.why_no_bound)}
        for scope, cost in cost_of_all_runs(config, last).by_scope.items()
    ]
    return pd.DataFrame(rows).set_index([ALGORITHM, CLIENT])


def _rows_of_run(method: Method, charges: Charges) -> list[dict[str, Any]]:
    """Returns one row for each scope of a run."""
    clients = {method.plan.scope_of(client_id): client_id for client_id in reversed(method.clients.client_ids)}
    rows = []
    for scope, client_id in reversed(clients.items()):
        claim, reason = method.plan.claim_of(client_id)
        why = charges.identity.non_private or (reason if claim == "none" else "")
        bound = math.inf
        if charges.ledger is not None and not why:
            bound = method.plan.guaranteed_epsilon(charges.ledger, client_id).best
        budget = method.plan.budgets.get(scope)
        epsilon, delta = (math.inf, 0.0) if budget is None else (budget.epsilon, budget.delta)
        rows.append({CLIENT: scope, **_spent(bound, delta, why, epsilon)})
    return rows


def _spent(epsilon: float, delta: float, why: str, budget: float = math.nan) -> dict[str, Any]:
    return {
        "epsilon_budget": budget,
        "epsilon_spent": epsilon,
        "epsilon_left": math.nan if math.isinf(budget) else budget - epsilon,
        "delta": delta,
        "why_no_bound": why,
    }


def composed_frame(config: ExperimentConfig, method: Method, runs: Collection[str]) -> pd.DataFrame:
    """Composes the cost of some runs, and that of all runs on record, to the records of a method's clients.

    Guarantee: as in `tff_pdp.training.record.all_runs.compose`, for the given runs alone and for all runs.
    Assumes: as in `tff_pdp.training.record.all_runs.compose`.

    Args:
      config: an experiment on the records.
      method: a method of the experiment.
      runs: ids of the runs.

    Returns:
      One row for each scope (a silo, or all users), with the index `client`. The columns `epsilon`, `delta`, `runs` and
      `why_no_bound` are for the given runs; the columns `all_epsilon`, `all_delta` and `all_runs` are for all runs on
      record, in all folders. An epsilon is infinite where no bound holds.

    Raises:
      DataError: the registry, or the record of a run in the experiment's folder, is damaged.
    """
    some, every = cost_of_all_runs(config, method, runs=runs), cost_of_all_runs(config, method)
    rows = [
        {
            CLIENT: scope,
            "epsilon": cost.epsilon,
            "delta": cost.delta,
            "runs": cost.releases,
            "why_no_bound": cost.why_no_bound,
            "all_epsilon": every.by_scope[scope].epsilon,
            "all_delta": every.by_scope[scope].delta,
            "all_runs": every.by_scope[scope].releases,
        }
        for scope, cost in some.by_scope.items()
    ]
    return pd.DataFrame(rows).set_index(CLIENT)
