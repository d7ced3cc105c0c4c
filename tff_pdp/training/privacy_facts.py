"""Collects the facts for an experiment's privacy statement from plans and ledgers: privacy costs of silos, or of users.

The facts include the cost of all runs on record. The facts also include the cost that tuning would have if every
configuration that was tried counted as a release.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dp_accounting import ComposedDpEvent

from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.privacy.accounting.accountants import EpsilonBounds, epsilon_bounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import compose_parts
from tff_pdp.privacy.facts import (
    FIXED_SEED,
    GUARANTEES,
    MethodFacts,
    RunsOnRecord,
    SearchFacts,
    SiloCosts,
    SiloFacts,
    SyntheticFacts,
    TuningFacts,
    UserCosts,
    UserFacts,
    UserSums,
)
from tff_pdp.privacy.plans.plan import BY_BUDGET
from tff_pdp.privacy.plans.silo_example import GRADIENTS
from tff_pdp.privacy.plans.user import USERS
from tff_pdp.privacy.synthetic.silo_data import SYNTHETIC
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.counted import cost_of_all_runs, splits_of

Trained = tuple[Method, Checkpoint]
# The condition of a claim where the data set was prepared with constants that nobody declared.
FROM_RECORDS = "constants that were taken from all clients' records without noise are treated as public"


def claim_of_run(method: Method, state: Checkpoint, shown_id: Callable[[str], str] | None = str) -> tuple[str, str]:
    """Returns the claim that holds for a run's models and all silos or users, and the claim's reason in one line.

    `shown_id` maps a silo's id to the id that the reason names; None if the reason must not name a silo.
    """
    if state.run_key.is_test_only:
        return "none", FIXED_SEED
    bare = sorted(map(shown_id or str, method.plan.clients_without_noise()))
    if bare:
        example = f", for example {bare[0]}" if shown_id else ""
        return "none", f"{len(bare)} silos trained without noise{example}"
    return _with_constants(method, method.plan.claim, method.plan.claim_reason)


def _with_constants(method: Method, claim: str, reason: str) -> tuple[str, str]:
    """Returns the claim and its reason where constants of the data may have been taken from all clients' records."""
    if claim not in GUARANTEES or not method.clients.manifest.treated_as_public:
        return claim, reason
    conditions = [reason.strip().rstrip(".")] if claim == "formal-conditional" else []
    return "formal-conditional", "; ".join([*conditions, FROM_RECORDS])


def _claim_of_silo(method: Method, state: Checkpoint, silo: str) -> tuple[str, str]:
    """Returns the claim for one silo, and the claim's reason; other silos may have another claim."""
    if state.run_key.is_test_only:
        return "none", FIXED_SEED
    return _with_constants(method, *method.plan.claim_of(silo))


def facts_of(config: ExperimentConfig, trained: Sequence[Trained]) -> SiloFacts | UserFacts:
    """Returns the facts for a privacy statement on the given trained methods; silos are in the dataset's order."""
    plans: list[Any] = [method.plan for method, _ in trained]
    methods = tuple(_method_facts(config, method, state) for method, state in trained)
    on_record = _runs_on_record(config, trained)
    taken = tuple(trained[0][0].clients.manifest.treated_as_public)
    if plans[0].samples_clients:
        return UserFacts(
            methods=methods,
            on_record=on_record,
            tuning=_tuning_facts(config, trained, USERS),
            generator=plans[0].generator,
            sums=user_sums(config, trained),
            taken_from_records=taken,
        )
    for _, state in trained:
        if state.ledger:
            # Computes the epsilons of all silos side by side, and keeps them for the calls below.
            state.ledger.epsilons()
    silos = tuple(_silo_costs(trained, silo) for silo in trained[0][0].clients.client_ids)
    worst = max(silos, key=lambda silo: silo.epsilon_spent)
    return SiloFacts(
        methods=methods,
        on_record=on_record,
        tuning=_tuning_facts(config, trained, worst.id if math.isfinite(worst.epsilon_spent) else None),
        generator=plans[0].generator,
        silos=silos,
        clip_norm=getattr(config.privacy, "clip_norm", math.inf),
        steps=max(plan.steps for plan in plans),
        sampler=plans[0].sampler,
        row_influence=plans[0].row_influence,
        other_releases=_other_releases([state for _, state in trained]),
        num_examples_are_noised=any(plan.num_examples_are_noised for plan in plans),
        level=getattr(getattr(config.privacy, "budgets", None), "level", "own"),
        has_common_noise=getattr(config.privacy, "noise_multiplier", None) is not None,
        synthetic=_synthetic_facts(config, trained),
        taken_from_records=taken,
    )


def _synthetic_facts(config: ExperimentConfig, trained: Sequence[Trained]) -> SyntheticFacts | None:
    """Returns the facts of silos' synthetic data, which all methods share; None without synthetic data."""
    section, method = config.privacy.synthetic, trained[0][0]
    if section is None:
        return None
    claim, reason = _with_constants(method, *section.generator.claim)
    if any(state.run_key.is_test_only for _, state in trained):
        claim, reason = "none", FIXED_SEED
    shared = _claim_of_shared(config, claim, reason)

    def costs(claim: str, *, of_data_alone: bool) -> tuple[float, ...]:
        if claim not in GUARANTEES:
            return (math.inf,) * len(method.clients.client_ids)
        found = []
        for silo in method.clients.client_ids:
            events = [one for one, why in method.plan.fixed_events[silo] if why == SYNTHETIC or not of_data_alone]
            found.append(epsilon_bounds(ComposedDpEvent(events), method.plan.budgets[silo].delta).best)
        return tuple(found)

    return SyntheticFacts(
        generator=str(config.to_dict()["privacy"]["synthetic"]["generator"]["kind"]),
        examples=section.generator.examples,
        rounds=section.rounds,
        is_adapted_privately=section.is_adapted_privately,
        epsilons=costs(claim, of_data_alone=True),
        claim=claim,
        claim_reason=reason,
        shared_epsilons=costs(shared[0], of_data_alone=False),
        shared_claim=shared[0],
        shared_claim_reason=shared[1],
    )


def _claim_of_shared(config: ExperimentConfig, claim: str, reason: str) -> tuple[str, str]:
    """Returns the claim for a shared model, from the claim for the synthetic data that the model is made of."""
    privacy = config.privacy
    if claim not in GUARANTEES:
        return claim, reason
    if privacy.feature_scaling.why_not_private:
        return "none", privacy.feature_scaling.why_not_private
    if config.training.weighting == "num_examples" and privacy.num_examples.epsilon is None:
        counts = "silos' numbers of training examples, by which silos have weights, are treated as public"
        return "formal-conditional", "; ".join([counts] + [reason] * (claim == "formal-conditional"))
    return claim, reason


def _method_facts(config: ExperimentConfig, method: Method, state: Checkpoint) -> MethodFacts:
    claim, reason = claim_of_run(method, state)
    return MethodFacts(
        name=method.algorithm.name,
        title=method.algorithm.title,
        claim=claim,
        claim_reason=reason,
        exported=method.algorithm.name == config.export.algorithm,
        user_costs=_user_costs(method, state) if method.plan.samples_clients else None,
        budget_exposure="public"
        if method.first_phase and config.training.weighting in BY_BUDGET
        else method.plan.budget_exposure(has_releases=bool(method.at(1).algorithm.released)),
    )


def _silo_costs(trained: Sequence[Trained], silo: str) -> SiloCosts:
    """Returns the cost to a silo in the method that spent most on the silo."""
    method, state = max(trained, key=lambda pair: _spent_by_silo(pair, silo))
    plan = method.plan
    claim, reason = _claim_of_silo(method, state, silo)
    bounds = plan.guaranteed_epsilon(state.ledger, silo) if state.ledger and claim != "none" else None
    return SiloCosts(
        id=silo,
        claim=claim,
        claim_reason=reason,
        **plan.client_facts(silo),
        **_epsilon_fields(plan.budgets.get(silo), bounds),
    )


def _spent_by_silo(pair: Trained, silo: str) -> tuple[bool, float]:
    """Returns a sort key of methods by a silo's spending; methods without a claim come last, sorted alike."""
    method, state = pair
    spent = method.plan.guaranteed_epsilon(state.ledger, silo).best if state.ledger else math.inf
    return _claim_of_silo(method, state, silo)[0] == "none", spent


def _other_releases(states: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Lists the reasons of releases other than gradients, each with the largest count of a silo."""
    counts: Counter[str] = Counter()
    for state in states:
        for entry in state.ledger.entries if state.ledger else ():
            if entry.reason != GRADIENTS:
                counts[entry.reason] = max(counts[entry.reason], entry.count)
    return tuple(f"{reason} ({count} times)" if count > 1 else reason for reason, count in counts.items())


def _tuning_facts(config: ExperimentConfig, trained: Sequence[Trained], scope: str | None) -> TuningFacts:
    """Returns what was tuned, and a scope's epsilon if every configuration tried were charged as a release."""
    tuning, charged = config.tuning, {}
    ledgers = [state.ledger for _, state in trained if state.ledger]
    if scope is not None and ledgers and tuning.configurations_tried > 1:
        costliest = max(ledgers, key=lambda ledger: ledger.epsilon(scope).best)
        bounds, delta = compose_parts([(costliest, scope)] * tuning.configurations_tried)
        if math.isfinite(bounds.best):
            charged = {"charged_epsilon": bounds.best, "charged_delta": delta}
    return TuningFacts(
        methods_compared=len(config.algorithms),
        tuned=tuple(tuning.tuned),
        configurations_tried=tuning.configurations_tried,
        search=_search_facts(config, trained),
        **charged,
    )


def _search_facts(config: ExperimentConfig, trained: Sequence[Trained]) -> SearchFacts | None:
    """Returns the facts of the private search among these methods' hyper-parameters; None without one."""
    for method, _ in trained:
        search, settings = method.plan.search, config.tuning.search
        if search is not None and settings is not None:
            return SearchFacts(
                method=method.algorithm.title,
                searched=tuple(search.candidates[0]),
                candidates=len(search.candidates),
                runs=settings.runs,
                mean_runs=None if search.is_fixed else settings.mean_runs,
            )
    return None


def _user_costs(method: Method, state: Checkpoint) -> UserCosts:
    """Returns the cost of training one method for every user; infinite if the method's claim is `none`."""
    plan: Any = method.plan
    has_claim = state.ledger is not None and claim_of_run(method, state)[0] != "none"
    spent = state.ledger.epsilon(USERS) if state.ledger and has_claim else None
    return plan.costs(_epsilon_fields(plan.budgets.get(USERS), spent))


def user_sums(config: ExperimentConfig, trained: Sequence[Trained]) -> UserSums:
    """Describes how users' releases are summed and noised, in the first method that releases anything."""
    plans: dict[str, Any] = {method.algorithm.title: method.plan for method, _ in trained}
    plan = max(plans.values(), key=lambda one: one.num_released > 0)
    return plan.sums(
        weight_cap=config.training.weight_cap if trained[0][0].is_weighted else None,
        own_support=tuple(title for title, one in plans.items() if one.noise_on_own_support),
    )


def _epsilon_fields(budget: SiloBudget | None, bounds: EpsilonBounds | None) -> dict[str, Any]:
    """Returns budget and spending under the names in reports; infinite without a budget, or without bounds."""
    names = ("epsilon_spent", "epsilon_rdp", "epsilon_pld")
    spent = (math.inf,) * 3 if bounds is None else (bounds.best, bounds.rdp, bounds.pld)
    return {
        "epsilon_target": math.inf if budget is None else budget.epsilon,
        "delta": 0.0 if budget is None else budget.delta,
        **dict(zip(names, (math.nan if one is None else one for one in spent), strict=True)),
    }


def _runs_on_record(config: ExperimentConfig, trained: Sequence[Trained]) -> RunsOnRecord:
    """Returns the cost of all runs on record, the largest of any scope; empty if a method has no ledger."""
    if not all(state.ledger for _, state in trained):
        return RunsOnRecord()
    # All of an experiment's methods are about the same clients; a search reads more of their examples.
    methods = {splits_of(method): method for method, _ in trained}
    costs = [cost_of_all_runs(config, method) for method in methods.values()]
    cost = max(costs, key=lambda one: (one.worst.why_no_bound != "", one.worst.epsilon, one.runs))
    return RunsOnRecord(
        epsilon=cost.worst.epsilon,
        delta=cost.worst.delta,
        runs=cost.runs,
        why_no_bound=cost.worst.why_no_bound,
        elsewhere=cost.elsewhere,
        taken_for_granted=tuple(cost.notes),
    )
