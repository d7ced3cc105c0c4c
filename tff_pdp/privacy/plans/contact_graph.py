"""Defines node- and edge-level DP in silos as a plan, and builds it: for rows made of a contact graph.

One person is in several of these rows.
"""

import dataclasses

import dp_accounting

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import Adjacency, next_float32
from tff_pdp.privacy.accounting.budgets import SiloBudget, parse_budgets
from tff_pdp.privacy.accounting.calibration import rounds_within_budget
from tff_pdp.privacy.accounting.row_influence import calibrate_rows_noise, poisson_rows_event
from tff_pdp.privacy.facts import checked_generator, condition_of_examples
from tff_pdp.privacy.plans.plan import Claim, PlannedTraining, checked_promise
from tff_pdp.privacy.plans.settings import PrivacyConfig
from tff_pdp.privacy.plans.silo_example import (
    SiloExamplePlan,
    check_delta,
    check_silo_settings,
    check_some_silo_trains,
    silo_mechanism,
    silo_noise,
    silo_sampling_rate,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContactGraphPlan(SiloExamplePlan):
    """Protects one person of a contact graph, or all contacts of one pair of people, in place of one example.

    Silos train as under `SiloExamplePlan`; what a gradient costs is another event, which counts every row that the
    person, or the pair, is in.

    Guarantee: with claim `formal-conditional`, everything that leaves silo k, and its personal model, is (epsilon_k,
      delta_k)-DP for the people of silo k (`node`) or for each pair's contacts (`edge`), where the ledger built here
      bounds epsilon_k.
    Assumes: what `row_influence` promises of the rows, and what `claim_reason` says. What one person's disease does to
      others' states is not a contact nor one's own value: neighbouring graphs have the same states of all others.

    Attributes:
      row_influence: what is protected, and S, the most rows that change with it.
    """

    row_influence: RowInfluence

    def gradient_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of one gradient computation in a silo."""
        mechanism = self.mechanisms[client_id]
        changed = changed_rows(self.row_influence, self.num_examples[client_id])
        return poisson_rows_event(mechanism.sampling_rate, mechanism.noise_multiplier, changed, 1)


def changed_rows(row_influence: RowInfluence, num_rows: int) -> int:
    """How many rows of a silo differ between neighbouring graphs: S, and of fewer rows all."""
    return min(row_influence.num_rows, num_rows)


_NOT_PROTECTED = {
    "node": "",
    "edge": "people's own features and disease states are not protected, only which pairs met and how",
}


def build_contact_graph_plan(config: PrivacyConfig, training: PlannedTraining) -> ContactGraphPlan:
    """Builds Poisson DP-SGD in each silo, calibrated to the silo's own budget for one person, or one pair's contacts.

    What is protected, and in how many rows it is, is the data set's promise and cannot be configured.

    Args:
      config: budgets, clip norm and expected batch size B; the sampling rate of silo k is `min(1, B / n_k)`.
      training: what the silos release, how often, and the `row_influence` of their rows.

    Raises:
      ConfigError: a budget is missing or malformed, a parameter is out of range, the data set's rows are independent,
        or training releases what is calibrated for one row.
      DataError: the data set's promise means nothing.
      BudgetError: a silo's budget cannot be met.
    """
    influence = _row_influence(config, training)
    budgets = parse_budgets(config.budgets, sorted(training.num_examples))
    mechanisms, last_rounds, drawn_noise = {}, {}, {}
    for client_id, budget in budgets.items():
        size = training.num_examples[client_id]
        check_delta(client_id, budget, size)
        sampling_rate = silo_sampling_rate(config.batch_size, size)
        drawn_noise.update(silo_noise(training, client_id))
        noise_multiplier, last_rounds[client_id] = _noise_and_last_round(
            config, training, client_id, budget, sampling_rate, influence
        )
        mechanisms[client_id] = silo_mechanism(config.clip_norm, noise_multiplier, sampling_rate, size)
    check_some_silo_trains(config, last_rounds)
    claim, reason = _claim(config, training, influence)
    return ContactGraphPlan(
        unit=influence.unit,
        adjacency=Adjacency(influence.adjacency),
        claim=claim,
        claim_reason=reason,
        mechanisms=mechanisms,
        budgets=budgets,
        num_examples=dict(training.num_examples),
        gradients_per_round=dict(training.gradients_per_round),
        rounds=training.rounds,
        last_rounds=last_rounds,
        drawn_noise=drawn_noise,
        generator=checked_generator(config.generator),
        row_influence=influence,
    )


def _row_influence(config: PrivacyConfig, training: PlannedTraining) -> RowInfluence:
    """The data set's promise, if the settings and what training releases suit it."""
    influence = checked_promise(training.row_influence)
    check_silo_settings(config, search=None)
    for_one_row = (
        (training.selection_rounds > 0, "the private selection of clusters (ifca and its relatives)"),
        (training.num_examples_are_noised, "privacy.num_examples kind noised"),
        (any(training.fixed_events.values()), "what silos release before training (privacy.feature_scaling)"),
        (training.search is not None, "tuning.search"),
        (config.sampler != "poisson", f"privacy.sampler {config.sampler}"),
        (config.noise_calibration != "tightest", f"privacy.noise_calibration {config.noise_calibration}"),
    )
    for is_used, what in for_one_row:
        if is_used:
            raise ConfigError(
                f"privacy.plan contact_graph: {what} is for one row, and a person is in several: leave it out"
            )
    return influence


def _noise_and_last_round(
    config: PrivacyConfig,
    training: PlannedTraining,
    client_id: str,
    budget: SiloBudget,
    sampling_rate: float,
    influence: RowInfluence,
) -> tuple[float, int]:
    """The noise a budget asks for over all rounds or, where the noise is given, the round at which it is spent."""
    steps, adjacency = training.gradients_per_round[client_id], Adjacency(influence.adjacency)
    changed = changed_rows(influence, training.num_examples[client_id])
    drawn_noise = list(silo_noise(training, client_id).values())
    if config.noise_multiplier is not None:
        noise_multiplier = next_float32(config.noise_multiplier)
        event = poisson_rows_event(sampling_rate, noise_multiplier, changed, steps)
        return noise_multiplier, rounds_within_budget(budget, event, drawn_noise, training.rounds, adjacency)
    planned_steps = training.rounds * steps
    try:
        calibrated = calibrate_rows_noise(
            lambda noise_multiplier: poisson_rows_event(sampling_rate, noise_multiplier, changed, planned_steps),
            budget.epsilon,
            budget.delta,
            adjacency,
            drawn_noise,
        )
    except BudgetError as error:
        raise BudgetError(f"silo {client_id!r}: {error} Here up to {changed} rows differ at once.") from None
    return next_float32(calibrated), training.rounds


def _claim(config: PrivacyConfig, training: PlannedTraining, influence: RowInfluence) -> tuple[Claim, str]:
    if training.unsound:
        return "none", training.unsound
    conditions = (
        "the number of rows of each silo, and which silo each person belongs to, are treated as public",
        "everyone is in rows of one silo only",
        f"at most {influence.num_rows} rows differ: {influence.rule}",
        training.condition,
        _NOT_PROTECTED[influence.unit],
        condition_of_examples(checked_generator(config.generator)),
    )
    return "formal-conditional", "; ".join(filter(None, conditions))
