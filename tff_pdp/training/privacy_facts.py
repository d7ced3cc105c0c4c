"""Collects what every silo or user paid and got, and makes an experiment's privacy statement of it.

The statement also has what all runs on record cost together, and what tuning would have cost.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.privacy.accounting.accountants import EpsilonBounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import compose_parts
from tff_pdp.privacy.facts import FIXED_SEED, UserCosts, UserSums
from tff_pdp.privacy.plans.silo_example import GRADIENTS
from tff_pdp.privacy.plans.user import USERS
from tff_pdp.reports.content import AlgorithmResult, ClientScores, SiloResult
from tff_pdp.reports.statement import build_privacy_statement, build_user_statement
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.counted import cost_of_all_runs, splits_of

Trained = tuple[Method, Checkpoint]


def claim_of_run(method: Method, state: Checkpoint, shown_id: Callable[[str], str] | None = str) -> tuple[str, str]:
    """The claim of the models that a run released, and one line that says why: of all its silos, or users, together.

    Args:
      method: what was trained.
      state: of the run; its key says whether its noise can be guessed.
      shown_id: what stands in place of a silo's id; None where no silo is to be named.
    """
    if state.run_key.is_test_only:
        return "none", FIXED_SEED
    bare = sorted(map(shown_id or str, method.plan.clients_without_noise()))
    if bare:
        example = f", for example {bare[0]}" if shown_id else ""
        return "none", f"{len(bare)} silos trained without noise{example}"
    return method.plan.claim, method.plan.claim_reason


def claim_of_silo(method: Method, state: Checkpoint, silo: str) -> tuple[str, str]:
    """The claim for one silo, which may have one where another silo has none."""
    if state.run_key.is_test_only:
        return "none", FIXED_SEED
    return method.plan.claim_of(silo)


def silo_results(trained: Sequence[Trained], scores: Sequence[ClientScores]) -> tuple[SiloResult, ...]:
    """One row per silo; where methods spent differently, the one that spent most."""
    return tuple(_silo_result(own, trained) for own in scores)


def silo_statement(
    config: ExperimentConfig,
    trained: Sequence[Trained],
    algorithms: Sequence[AlgorithmResult],
    silos: Sequence[SiloResult],
) -> dict[str, Any]:
    """The privacy statement."""
    plans: list[Any] = [method.plan for method, _ in trained]
    return build_privacy_statement(
        algorithms=algorithms,
        silos=silos,
        clip=getattr(config.privacy, "clip_norm", math.inf),
        sampler=plans[0].sampler,
        generator=plans[0].generator,
        row_influence=plans[0].row_influence,
        other_releases=_other_releases([state for _, state in trained]),
        num_examples_are_noised=any(plan.num_examples_are_noised for plan in plans),
        steps=max(plan.steps for plan in plans),
        tuned=config.tuning.tuned,
        configurations_tried=config.tuning.configurations_tried,
        search=_search(config, trained),
        if_charged=_silo_if_charged(config, trained, silos),
        **_recorded_costs(config, trained),
    )


def _silo_result(own: ClientScores, trained: Sequence[Trained]) -> SiloResult:
    method, state = max(trained, key=lambda pair: _spent_by_silo(pair, own.id))
    plan = method.plan
    claim, reason = claim_of_silo(method, state, own.id)
    bounds = plan.guaranteed_epsilon(state.ledger, own.id) if state.ledger and claim != "none" else None
    return SiloResult(
        id=own.id,
        num_test=own.num_test,
        personal=own.personal,
        shared=own.shared,
        claim=claim,
        claim_reason=reason,
        **plan.client_facts(own.id),
        **_epsilon_fields(plan.budgets.get(own.id), bounds),
    )


def _spent_by_silo(pair: Trained, silo: str) -> tuple[bool, float]:
    """Orders methods by what a silo spent: those without a claim last, and among these, too, by the accounting."""
    method, state = pair
    spent = method.plan.guaranteed_epsilon(state.ledger, silo).best if state.ledger else math.inf
    return claim_of_silo(method, state, silo)[0] == "none", spent


def _other_releases(states: Sequence[Checkpoint]) -> list[str]:
    """What is in the ledgers besides gradients: reasons, and how often in one silo at most."""
    counts: Counter[str] = Counter()
    for state in states:
        for entry in state.ledger.entries if state.ledger else ():
            if entry.reason != GRADIENTS:
                counts[entry.reason] = max(counts[entry.reason], entry.count)
    return [f"{reason} ({count} times)" if count > 1 else reason for reason, count in counts.items()]


def _search(config: ExperimentConfig, trained: Sequence[Trained]) -> dict[str, Any] | None:
    """The private search among these methods' hyper-parameters, in the words of the statement."""
    for method, _ in trained:
        search, settings = method.plan.search, config.tuning.search
        if search is not None and settings is not None:
            return {
                "method": method.algorithm.title,
                "searched": list(search.candidates[0]),
                "candidates": len(search.candidates),
                "runs": settings.runs,
                "mean_runs": None if search.is_fixed else settings.mean_runs,
            }
    return None


def _silo_if_charged(
    config: ExperimentConfig, trained: Sequence[Trained], silos: Sequence[SiloResult]
) -> Mapping[str, float] | None:
    """What the silo that spent most would have spent, had every configuration tried been a release."""
    worst = max(silos, key=lambda silo: silo.epsilon_spent)
    if not math.isfinite(worst.epsilon_spent):
        return None
    return _if_charged(config, trained, worst.id)


def user_costs(method: Method, state: Checkpoint) -> UserCosts:
    """What the training of one method cost every user: infinitely much where its claim is `none`."""
    plan: Any = method.plan
    has_claim = state.ledger is not None and claim_of_run(method, state)[0] != "none"
    spent = state.ledger.epsilon(USERS) if state.ledger and has_claim else None
    return plan.costs(_epsilon_fields(plan.budgets.get(USERS), spent))


def user_statement(
    config: ExperimentConfig, trained: Sequence[Trained], algorithms: Sequence[AlgorithmResult]
) -> dict[str, Any]:
    """The privacy statement."""
    return build_user_statement(
        algorithms=algorithms,
        sums=user_sums(config, trained),
        tuned=config.tuning.tuned,
        configurations_tried=config.tuning.configurations_tried,
        if_charged=_user_if_charged(config, trained),
        generator=trained[0][0].plan.generator,
        **_recorded_costs(config, trained),
    )


def user_sums(config: ExperimentConfig, trained: Sequence[Trained]) -> UserSums:
    """How what users release is summed and noised, by a method that releases something, where there is one."""
    plans: dict[str, Any] = {method.algorithm.title: method.plan for method, _ in trained}
    plan = max(plans.values(), key=lambda one: one.num_released > 0)
    return plan.sums(
        weight_cap=config.training.weight_cap if trained[0][0].is_weighted else None,
        own_support=tuple(title for title, one in plans.items() if one.noise_on_own_support),
    )


def _user_if_charged(config: ExperimentConfig, trained: Sequence[Trained]) -> Mapping[str, float] | None:
    """What every user would have spent, had every configuration tried been a release."""
    return _if_charged(config, trained, USERS)


def _epsilon_fields(budget: SiloBudget | None, bounds: EpsilonBounds | None) -> dict[str, Any]:
    """Budget and spending under the names that reports give them; infinite without a budget, or without bounds."""
    asked = {"epsilon_target": math.inf, "delta": 0.0}
    if budget is not None:
        asked = {"epsilon_target": budget.epsilon, "delta": budget.delta}
    if bounds is None:
        return {**asked, **dict.fromkeys(("epsilon_spent", "epsilon_rdp", "epsilon_pld"), math.inf)}
    return {
        **asked,
        "epsilon_spent": bounds.best,
        "epsilon_rdp": math.nan if bounds.rdp is None else bounds.rdp,
        "epsilon_pld": math.nan if bounds.pld is None else bounds.pld,
    }


def _recorded_costs(config: ExperimentConfig, trained: Sequence[Trained]) -> dict[str, Any]:
    """What a privacy statement is told of all runs on record: the largest epsilon of a scope, delta, how many runs.

    Args:
      config: the experiment.
      trained: the methods that are reported on; where one has no ledger, nothing is known of their union.
    """
    if not all(state.ledger for _, state in trained):
        return {"composed_epsilon": None, "composed_delta": None, "recorded_runs": None}
    # All of an experiment's methods are about the same clients; a search reads more of their examples.
    methods = {splits_of(method): method for method, _ in trained}
    costs = [cost_of_all_runs(config, method) for method in methods.values()]
    cost = max(costs, key=lambda one: (one.worst.why_no_bound != "", one.worst.epsilon, one.runs))
    return {
        "composed_epsilon": cost.worst.epsilon,
        "composed_delta": cost.worst.delta,
        "recorded_runs": cost.runs,
        "why_no_bound": cost.worst.why_no_bound,
        "elsewhere": cost.elsewhere,
        "taken_for_granted": cost.notes,
    }


def _if_charged(config: ExperimentConfig, trained: Sequence[Trained], scope: str) -> Mapping[str, float] | None:
    """What a scope would have spent, had every configuration tried been a release; None where that says nothing."""
    tried = config.tuning.configurations_tried
    ledgers = [state.ledger for _, state in trained if state.ledger]
    if tried < 2 or not ledgers:
        return None
    costliest = max(ledgers, key=lambda ledger: ledger.epsilon(scope).best)
    bounds, delta = compose_parts([(costliest, scope)] * tried)
    return {"epsilon": bounds.best, "delta": delta} if math.isfinite(bounds.best) else None
