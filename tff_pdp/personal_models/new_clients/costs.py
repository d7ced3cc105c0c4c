"""Plans the DP mechanism that fits new silos within a budget, and puts the cost on record before the fit.

`tff_pdp.training.record.all_runs` reads the entries, and composes the costs of all fits and runs on the same records.
"""

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.personal_models.new_clients.examples import NewClients
from tff_pdp.privacy.accounting.accountants import Adjacency
from tff_pdp.privacy.accounting.budgets import OneForAll, SiloBudget
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.facts import Generator, condition_of_examples
from tff_pdp.privacy.plans.plan import PlannedTraining, PlanSettings
from tff_pdp.privacy.plans.silo_example import SELECTION, SiloExample, SiloExamplePlan
from tff_pdp.privacy.plans.silo_noise import check_delta
from tff_pdp.registry.entries import Registry
from tff_pdp.training.record.all_runs import Composed, Own, compose, releases_on_record
from tff_pdp.training.record.releases import NO_PRIVACY, PERSONALIZE, Release, enter

_PUBLIC_NUMBER = "the number of examples of each silo that is added is treated as public"


def claim_of_fit(generator: Generator) -> tuple[str, str]:
    """Returns the privacy claim for a fit of new silos, and the reason why it cannot be stronger."""
    return "formal-conditional", f"{_PUBLIC_NUMBER}; {condition_of_examples(generator)}"


def plan_gradients(
    config: PlanSettings,
    budget: SiloBudget,
    steps: int,
    num_examples: Mapping[str, int],
    num_parameters: int,
    *,
    batch_size: int,
    clip_norm: float,
) -> tuple[SiloExamplePlan, Ledger]:
    """Plans DP-SGD on each silo's own examples; returns the plan and a ledger charged with all steps.

    Guarantee: `steps` gradients of `privacy.mechanisms.dp_sgd` with the plan's mechanism are (epsilon, delta)-DP for
      the silo's examples under add/remove of one example. Batches are Poisson batches, even if training had others.
    Assumes: numbers of examples are public, as the configuration says.

    Args:
      config: settings of the experiment's plan, which name the generator of random bits.
      budget: budget of each silo, for this fit.
      steps: number of gradient steps.
      num_examples: number of each silo's examples, by client id.
      num_parameters: number of weights that are fitted.
      batch_size: expected size of a Poisson batch.
      clip_norm: L2 bound on each example's gradient.

    Raises:
      ConfigError: numbers of examples are not public, a value is out of range, or delta is not below 1 / examples.
      BudgetError: no noise meets the budget.
    """
    _check_public(config)
    settings = SiloExample(
        kind="silo_example",
        budgets=OneForAll(epsilon=budget.epsilon, delta=budget.delta),
        batch_size=batch_size,
        clip_norm=clip_norm,
        generator=config.generator,
    )
    plan = settings.build(
        PlannedTraining(
            num_examples=num_examples,
            gradients_per_round=dict.fromkeys(num_examples, steps),
            rounds=1,
            num_parameters=num_parameters,
        )
    )
    ledger = Ledger(plan.unit, plan.adjacency, plan.budgets)
    plan.charge_round(ledger, 1)
    return plan, ledger


def plan_selection(config: PlanSettings, budget: SiloBudget, num_examples: Mapping[str, int]) -> tuple[float, Ledger]:
    """Plans one private selection in each silo; returns its epsilon, at most the budget's, and the charged ledger.

    Guarantee: as in `privacy.mechanisms.selection`, for one selection with this epsilon.

    Raises:
      ConfigError: as in `plan_gradients`.
    """
    _check_public(config)
    for client_id, size in num_examples.items():
        check_delta(client_id, budget, size)
    # Selections run with a float32 epsilon, which must not be above the epsilon that is charged.
    epsilon = float(np.float32(budget.epsilon))
    if epsilon > budget.epsilon:
        epsilon = float(np.nextafter(np.float32(budget.epsilon), np.float32(0)))
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, dict.fromkeys(num_examples, budget))
    for client_id in num_examples:
        ledger.append(client_id, ExponentialMechanismDpEvent(epsilon), 1, SELECTION)
    return epsilon, ledger


def put_on_record(config: ExperimentConfig, new: NewClients, ledger: Ledger | None) -> dict[str, Composed]:
    """Enters a fit into the record of an experiment's folder and into the registry, safe against a power cut.

    Call this before the fit: its cost is then on record even if the fit is stopped before anything is published.
    `ledger` is the fit's ledger; None if the fit adds no noise.

    Guarantee: together, all recorded fits of a silo and all recorded runs on the silo's records, in all folders, are
      (epsilon, delta)-DP for each record; the returned cost is this epsilon and delta.
    Assumes: a client id means the same silo everywhere in the folder; the assumptions of
      `tff_pdp.training.record.all_runs.compose`.

    Returns:
      Cost of all that is on record about each client's records, this fit included, by client id.

    Raises:
      DataError: the record cannot be read. The fit must not begin, although its cost may be on record already.
      OSError: the record or the registry cannot be written; the fit must not begin.
    """
    registry, output, sets = Registry(config.privacy.registry), Path(config.output), config.data.record_set
    fit = Release(ledger, None if ledger else NO_PRIVACY, run_id=secrets.token_hex(16))
    client_ids = list(new.client_ids)
    records = (
        registry.keep_examples(client_ids, list(new.features.values()))
        if new.dataset is None
        else registry.keep_clients(new.dataset, client_ids)
    )
    # Checks, before anything is entered, that the record can be read.
    releases_on_record(registry, output)
    registry.begin(
        fit.run_id,
        PERSONALIZE,
        output,
        records=records,
        record_set=sets,
        non_private=fit.non_private,
        ledger=ledger,
        rounds=fit.rounds,
    )
    enter(output, fit)
    # With this fit, and with others that began at the same time.
    cost = compose(registry, releases_on_record(registry, output), Own(records, sets, client_ids))
    for note in cost.notes:
        print(f"{PERSONALIZE}: note: {note}", file=sys.stderr)
    return dict(cost.by_scope)


def _check_public(config: PlanSettings) -> None:
    if config.num_examples.epsilon is not None:
        raise ConfigError(
            "privacy.num_examples.epsilon is set, so that numbers of examples are not public, but a new silo's noise "
            "would depend on its exact number. Prepare and train again with the silo among the others"
        )
