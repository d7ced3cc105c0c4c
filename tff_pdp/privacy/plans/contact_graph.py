"""Protects people, or pairs of people, of a contact graph inside their silo: settings, plan and builder.

Rows are made from the graph, and one person is in several rows. This is node- and edge-level DP.
"""

import dataclasses
from typing import TYPE_CHECKING

import dp_accounting

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import Adjacency, next_float32
from tff_pdp.privacy.accounting.budgets import Budgets, SiloBudget
from tff_pdp.privacy.accounting.calibration import rounds_within_budget
from tff_pdp.privacy.accounting.row_influence import calibrate_rows_noise, poisson_rows_event
from tff_pdp.privacy.facts import condition_of_examples
from tff_pdp.privacy.mechanisms.feature_scaling import ScalingsWithoutRelease, Unscaled
from tff_pdp.privacy.plans.plan import Claim, PlannedTraining, PlanSettings
from tff_pdp.privacy.plans.silo_example import SiloExamplePlan
from tff_pdp.privacy.plans.silo_noise import PlannedSilo, calibrated_silos
from tff_pdp.settings import Positive

if TYPE_CHECKING:
    from tff_pdp.algorithms.base import Algorithm


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContactGraphPlan(SiloExamplePlan):
    """Protects one person of a contact graph, or all contacts of one pair of people, instead of one example.

    Silos train as in `SiloExamplePlan`, but the event of a gradient covers all rows of the person or the pair.

    Guarantee: with claim `formal-conditional`, everything that leaves silo k, and its personal model, is (epsilon_k,
      delta_k)-DP for the people of silo k (`node`) or for each pair's contacts (`edge`), where the ledger built here
      bounds epsilon_k.
    Assumes: the data set's `row_influence` is right, and the conditions in `claim_reason` hold. The effect of a
      person's disease on others' states is not protected: in neighbouring graphs all other people have the same states.
    """

    def gradient_event(self, client_id: str) -> dp_accounting.DpEvent:
        """Builds the event of one gradient computation in a silo."""
        assert self.row_influence is not None
        mechanism = self.mechanisms[client_id]
        # S rows differ between neighbouring graphs, or all where there are fewer.
        changed = min(self.row_influence.num_rows, self.num_examples[client_id])
        return poisson_rows_event(mechanism.sampling_rate, mechanism.noise_multiplier, changed, 1)


_NOT_PROTECTED = {
    "node": "",
    "edge": "people's own features and disease states are not protected, only which pairs met and how",
}


class ContactGraph(PlanSettings):
    """Protects people of a contact graph, or all contacts of one pair, inside their silo.

    The data set determines which of the two is protected, and in how many rows a person is; neither can be configured.
    Only gradients may be released, because other releases are calibrated for one row, and a person changes more than
    one row.

    Attributes:
      budgets: epsilon and delta of each silo, for one person, or one pair's contacts.
      clip_norm: C, L2 bound on each row's gradient.
      noise_multiplier: z, equal for all silos; each silo leaves when its budget is spent. By default every silo stays
        to the last round, with the noise that the silo's budget needs.
    """

    budgets: Budgets
    clip_norm: Positive = 1.0
    noise_multiplier: Positive | None = None
    feature_scaling: ScalingsWithoutRelease = Unscaled()

    def check(self, algorithm: "Algorithm", weighting: str) -> None:
        """Checks that a method and a weighting are for silos, and that the method makes no private selection."""
        super().check(algorithm, weighting)
        if algorithm.selection_rounds:
            raise ConfigError(
                f"algorithms.{algorithm.name} selects a cluster privately, calibrated to one row, but under "
                "privacy.kind contact_graph a person is in several rows: use another method"
            )

    def check_rows(self, row_influence: RowInfluence | None) -> None:
        """Checks that rows are made of a contact graph."""
        if row_influence is None:
            raise ConfigError(
                "privacy.kind contact_graph is for rows made of a contact graph, and this data set's manifest has no "
                "row_influence: its examples are independent. Set privacy.kind to silo_example, or to user"
            )
        row_influence.checked()

    def fit_budget(self, epsilon: float | None, delta: float | None) -> SiloBudget | None:
        """Raises a ConfigError, because new clients cannot be fitted under this plan."""
        raise ConfigError(
            "privacy.kind contact_graph: examples are rows made of people's contacts, so a new client's rows reveal "
            "people in other clients' rows too, and no epsilon would cover both. Train again with the new client"
        )

    def build(self, training: PlannedTraining) -> ContactGraphPlan:
        """Builds Poisson DP-SGD in each silo, calibrated to the silo's own budget for one person, or one pair.

        The sampling rate of silo k is `min(1, batch_size / n_k)`, rounded up to a multiple of 2**-23.

        Args:
          training: the silos' releases, how often each is made, and the `row_influence` of the rows.

        Raises:
          ConfigError: a budget is missing, the data set's rows are independent, or training makes a release that is
            calibrated for one row.
          DataError: the data set's `row_influence` is not valid.
          BudgetError: a silo's budget cannot be met.
        """
        self.check_rows(training.row_influence)
        influence = training.row_influence
        assert influence is not None
        for_one_row = {
            "the private selection of clusters": training.selection_rounds,
            "a noised number of examples": training.num_examples_are_noised,
            "what silos release before training": any(training.fixed_events.values()),
            "tuning.search": training.search is not None,
        }
        for what, is_used in for_one_row.items():
            if is_used:
                raise ConfigError(
                    f"privacy.kind contact_graph: {what} is calibrated to one row; a person is in several: leave it out"
                )
        claim, reason = _claim(self, training, influence)
        return ContactGraphPlan(
            unit=influence.unit,
            adjacency=Adjacency(influence.adjacency),
            claim=claim,
            claim_reason=reason,
            row_influence=influence,
            **calibrated_silos(self, training, _noise_and_last_round),
        )


def _noise_and_last_round(settings: ContactGraph, training: PlannedTraining, silo: PlannedSilo) -> tuple[float, int]:
    """Returns the noise that a budget needs over all rounds, or given noise and the last round that it pays for."""
    steps, (client_id, budget, sampling_rate, drawn_noise) = training.gradients_per_round[silo.client_id], silo
    influence = training.row_influence
    assert influence is not None
    adjacency, changed = Adjacency(influence.adjacency), min(influence.num_rows, training.num_examples[client_id])
    if settings.noise_multiplier is not None:
        noise_multiplier = next_float32(settings.noise_multiplier)
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
        raise BudgetError(f"silo {client_id!r}: {error} Neighbouring graphs differ in up to {changed} rows.") from None
    return next_float32(calibrated), training.rounds


def _claim(settings: ContactGraph, training: PlannedTraining, influence: RowInfluence) -> tuple[Claim, str]:
    if training.unsound:
        return "none", training.unsound
    conditions = (
        "the number of rows of each silo, and which silo each person belongs to, are treated as public",
        "everyone is in rows of one silo only",
        f"at most {influence.num_rows} rows differ: {influence.rule}",
        training.condition,
        _NOT_PROTECTED[influence.unit],
        condition_of_examples(settings.generator),
    )
    return "formal-conditional", "; ".join(filter(None, conditions))
