"""Runs a private search for hyper-parameters, in the order charge, pivot run, repetitions, selection.

The result is a trained method with the model that each silo selected, and a ledger with the cost of the search.
`search_costs` compares this cost with the costs of two alternatives: no search, and a search of every candidate.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dp_accounting

from tff_pdp.engines.running import Engine
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.files import discard
from tff_pdp.lock import only_writer
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.accounting.repeated_runs import search_event
from tff_pdp.privacy.plans.plan import PrivacyPlan
from tff_pdp.privacy.plans.search import Search
from tff_pdp.reports.advice import advice_on_search
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.words import between, upper
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.counted import check_newest, enter_run, say_cost_so_far, settle, tell_registry
from tff_pdp.training.privacy_facts import claim_of_run
from tff_pdp.training.progress import Progress
from tff_pdp.training.record.arithmetic import of_first_version
from tff_pdp.training.record.charges import ChargesWriter, read_charges
from tff_pdp.training.record.releases import CHECKPOINTS, SEARCH, check_files, check_record, set_aside, surroundings_of
from tff_pdp.training.rounds import first_state
from tff_pdp.training.run_folder import (
    FILES_BESIDE,
    SELECTED_FILE,
    check_beside,
    check_engine,
    other_settings,
    read_selected,
    start_folder,
    sweep,
    write_selected,
)
from tff_pdp.training.search import runs as search_states
from tff_pdp.training.search.runs import candidate_of, noisy_scores, numbers_of_runs, repeat, run_pivot
from tff_pdp.training.spending import Choices, arithmetic_here, close_run, open_run


@dataclasses.dataclass(frozen=True)
class SearchCosts:
    """Epsilons of one silo's search and of two alternatives, all at the budget's delta and with the search's noise.

    Attributes:
      total: epsilon of everything on record: the statistics released before training, the pivot run and the search.
      untuned: epsilon of one training with hyper-parameters chosen in advance. None if numbers of examples are noised:
        the training noise then depends on the noised numbers, and only the budget, equal to `total`, is a bound.
      fixed_grid: epsilon of a search that tries every candidate once; None if `untuned` is None.
    """

    total: float
    untuned: float | None
    fixed_grid: float | None


def search_costs(plan: PrivacyPlan, search: Search, ledger: Ledger) -> dict[str, SearchCosts]:
    """Computes each silo's costs of a search, by client id; `ledger` must have been charged by `plan.charge_search`."""
    return {client_id: _costs(plan, search, ledger, client_id) for client_id in plan.budgets}


def _costs(plan: PrivacyPlan, search: Search, ledger: Ledger, client_id: str) -> SearchCosts:
    if plan.num_examples_are_noised:
        return SearchCosts(plan.guaranteed_epsilon(ledger, client_id).best, untuned=None, fixed_grid=None)
    before = [event for event, _ in plan.fixed_events.get(client_id, ())]
    before += [plan.drawn_noise[client_id]] if client_id in plan.drawn_noise else []
    training = plan.training_event(client_id)
    run = dp_accounting.ComposedDpEvent([training, search.score_event])
    pivot = [training] if search.has_pivot else []

    def epsilon(*events: dp_accounting.DpEvent) -> float:
        everything = dp_accounting.ComposedDpEvent([*before, *events])
        return epsilon_bounds(everything, plan.budgets[client_id].delta, plan.adjacency).best

    return SearchCosts(
        total=ledger.epsilon(client_id).best,
        untuned=epsilon(training),
        fixed_grid=epsilon(*pivot, search_event(run, len(search.candidates))),
    )


@dataclasses.dataclass(frozen=True)
class TunedMethod:
    """The result of a finished search.

    Attributes:
      method: the method.
      search: the method's search.
      state: final state of the method, with the client states that silos selected.
      selected: for each client id, `hparams` (values by name) and `noisy_score` (None if the silo made no run).
      costs: costs of the search to each silo, by client id; empty if no privacy is claimed.
      claim: privacy claim for the selected models.
      claim_reason: reason why the claim is no stronger.
    """

    method: Method
    search: Search
    state: Checkpoint
    selected: Mapping[str, Mapping[str, Any]]
    costs: Mapping[str, SearchCosts]
    claim: str
    claim_reason: str


def tune(
    config: ExperimentConfig,
    name: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    log_file: Path | None = None,
) -> TunedMethod:
    """Searches hyper-parameters of one method of an experiment, with the settings `tuning.search`.

    Guarantee: everything that leaves silo k, including its selected model, hyper-parameters and noisy score, is
      (epsilon_k, delta_k)-DP for one example of its training or validation split. The ledger's epsilon_k is at most
      the budget. The ledger is charged for the whole search, and stored with the key, before anything is trained.
    Assumes: as in `privacy.plans.plan.PrivacyPlan` and `privacy.plans.search.Search`. Here all silos are simulated in
      one process. The duration of the search, the folder `search` during the search, and the run key reveal the
      silos' numbers of repetitions; in a deployment, all three would stay in the silo.

    A resumed search ends with the same bits as an uninterrupted search: the pivot run is repeated with the same key,
    which releases nothing new, and every silo continues from the best of its finished runs. A search is refused where
    the bits may differ, such as on a GPU without the evidence of `engines.devices.gpu_arithmetic`.

    Args:
      config: the experiment.
      name: name of the method to search.
      resume: whether to continue a search that was stopped, if there is one.
      overwrite: whether to start again if a run exists; the old run's cost stays on record (`training.counted`).
      progress: whether to show the progress of the pivot run on standard error.
      log_file: file that lines on the progress are added to; None for no file.

    Raises:
      ConfigError: the experiment has no search for this method, the method cannot be searched, a run exists and neither
        `resume` nor `overwrite` is given, or the existing run has other settings.
      BudgetError: a silo's budget cannot be met.
      DataError, EngineError: a file is damaged, or the engine fails.

    >>> from tff_pdp.experiment.config import with_values
    >>> searched = with_values(
    ...     config,
    ...     {
    ...         "algorithms.searched": {"kind": "mr_mtl", "learning_rate": 0.3, "prox_weight": 0.3},
    ...         "tuning.search": {"algorithm": "searched", "values": {"prox_weight": [0.1, 1.0]}, "mean_runs": 2.0},
    ...     },
    ...     "example",
    ... )
    >>> sorted(tune(searched, "searched", resume=True, progress=False).selected)
    ['silo_0', 'silo_1', 'silo_2', 'silo_3']
    """
    check_beside(config.algorithm_folder(name), is_replaced=overwrite)
    method = build_method(config, name)
    method.trace()
    search = method.plan.search
    if search is None:
        raise ConfigError(f"{name}: there is nothing to search; give tuning.search, or --algorithm and --values")
    folder = config.algorithm_folder(name)
    with only_writer(folder):
        if overwrite:
            settle(config, folder)
            set_aside(folder.parent, folder)
            say_cost_so_far(config, method)
        choices = Choices(folder if resume else None)
        with experiment_engine(config, choices) as engine:
            result = _finished(config, method, folder, resume)
            if result is None:
                started = _start_or_resume(config, method, folder, engine, resume)
                choices.keep_by(functools.partial(_choose, config, folder))
                result = _search(method, search, folder, started, progress, log_file)
        sweep(folder)
        with ChargesWriter(folder) as writer:
            close_run(writer, result)
        settle(config, folder)
        # The result is saved, so the states that silos kept for themselves are not needed any more.
        discard(folder / SEARCH)
    claim, claim_reason = claim_of_run(method, result)
    return TunedMethod(
        method=method,
        search=search,
        state=result,
        selected=read_selected(folder),
        # An epsilon without a claim would be read as a claim.
        costs=search_costs(method.plan, search, result.ledger) if result.ledger and claim != "none" else {},
        claim=claim,
        claim_reason=claim_reason,
    )


def tune_summary(config: ExperimentConfig, tuned: TunedMethod) -> dict[str, Any]:
    """Summarises a finished search for `tff-pdp tune`, as plain data: selections of silos, and ranges of costs."""
    name = tuned.method.algorithm.name
    costs = {
        field.name: [cost for silo in tuned.costs.values() if (cost := getattr(silo, field.name)) is not None]
        for field in dataclasses.fields(SearchCosts)
    }
    summary = {
        "algorithm": name,
        "folder": str(config.algorithm_folder(name)),
        "rounds": tuned.state.round_number,
        "searched": list(tuned.search.candidates[0]),
        "candidates": len(tuned.search.candidates),
        "claim": tuned.claim,
        "claim_reason": tuned.claim_reason,
        "epsilon": {key: {"minimum": min(one), "maximum": max(one)} for key, one in costs.items() if one},
        "selected": tuned.selected,
        "advice": advice_on_search(tuned.selected, config.tuning.search.values) if config.tuning.search else [],
    }
    return json_safe(summary)


def tune_text(summary: Mapping[str, Any]) -> str:
    """Formats the result of `tune_summary` as text, without the silos' selections."""
    count = summary["candidates"]
    words = {
        "total": "epsilon spent, the search included",
        "untuned": "epsilon of one training with this noise, without a search",
        "fixed_grid": f"epsilon of trying each of the {count} candidates once, with this noise",
    }
    if "untuned" not in summary["epsilon"]:
        words["total"] = "epsilon at most, the search included (the budget: with noised counts, no smaller bound holds)"
    lines = [
        f"{summary['algorithm']}: {len(summary['selected'])} silos selected {' and '.join(summary['searched'])} among "
        f"{count} candidates, in {summary['folder']}"
    ]
    # The summary has words in place of numbers that JSON cannot hold.
    lines += [
        f"{words[key]}: {between([float(one['minimum']), float(one['maximum'])], upper)}"
        for key, one in summary["epsilon"].items()
    ]
    lines += [f"advice: {advice}" for advice in summary["advice"]]
    if not summary["epsilon"]:
        lines.append(f"claim: none, and no epsilon: {summary['claim_reason']}")
    return "\n".join(lines)


def _finished(config: ExperimentConfig, method: Method, folder: Path, resume: bool) -> Checkpoint | None:
    """Returns the result of a search that has ended already; None if there is none."""
    saved = checkpoints.load_latest(folder / CHECKPOINTS)
    if saved is not None:
        _check_resume(config, method, folder, resume, saved)
        check_record(folder, saved, read_charges(folder))
        check_files(folder, saved)
    return saved


def _start_or_resume(
    config: ExperimentConfig, method: Method, folder: Path, engine: Engine, resume: bool
) -> search_states.SearchState:
    first = first_state(method, config.training.test_only_seed)
    saved = search_states.load(folder / SEARCH, first)
    arithmetic, device = arithmetic_here(config, engine), engine.device
    if saved is not None:
        _check_resume(config, method, folder, resume, saved.first)
        check_record(folder, saved.first, read_charges(folder))
        check_files(folder, saved.first)
        check_engine(config, folder, device)
        _check_repeated(config, method, folder, saved.first, arithmetic)
        return saved
    settle(config, folder)
    start_folder(config, folder, device)
    with ChargesWriter(folder) as writer:
        open_run(writer, method, first)
        if first.ledger is not None:
            method.plan.charge_search(first.ledger)
        started = search_states.SearchState(first, [search_states.Best()] * len(first.client_ids))
        # Before anything is trained: a search that is stopped costs as much as a finished one.
        search_states.save(folder / SEARCH, started)
        enter_run(config, method, folder, writer.begun, first.ledger)
        writer.reserve(method.plan.rounds, first.ledger, arithmetic)
        tell_registry(config, writer.begun)
    return started


def _choose(config: ExperimentConfig, folder: Path, choices: Mapping[str, str]) -> None:
    """Puts on record how clients are computed from now on, before any result of this choice is used."""
    with ChargesWriter(folder) as writer:
        writer.choose(choices)
        tell_registry(config, writer.begun)


def _check_repeated(
    config: ExperimentConfig, method: Method, folder: Path, saved: Checkpoint, arithmetic: Mapping[str, Any]
) -> None:
    """Checks that the pivot run, and the runs of silos, would have the same bits again.

    A search that was stopped before it was on record is entered now, as one that has not begun.

    Raises:
      ConfigError: the bits would differ.
    """
    with ChargesWriter(folder) as writer:
        if writer.charges is None:
            # A search of the first version, which had no record: it may have run, with the draws of that version.
            open_run(writer, method, saved)
            writer.reserve(method.plan.rounds, saved.ledger, of_first_version(arithmetic))
        check_newest(config, folder, writer.begun)
        enter_run(config, method, folder, writer.begun, saved.ledger)
        if not writer.begun.through_round:
            writer.reserve(method.plan.rounds, saved.ledger, arithmetic)
        tell_registry(config, writer.begun)
        if saved.ledger and not writer.begun.attempt.can_be_repeated(0, arithmetic):
            raise ConfigError(
                f"{folder}: the search was started on another processor, on a GPU whose bits may differ, with another "
                "version of this project, or with other versions or settings of TensorFlow, so its releases cannot be "
                "repeated to the same bits: resume it as it was started, or give --overwrite to start again"
            )


def _check_resume(config: ExperimentConfig, method: Method, folder: Path, resume: bool, saved: Checkpoint) -> None:
    if not resume:
        raise ConfigError(f"{folder} holds a run already: give --resume or --overwrite")
    if not saved.was_made_with(method.config_hash):
        raise ConfigError(other_settings(config, method.algorithm.name, folder, "the search"))


def _search(
    method: Method,
    search: Search,
    folder: Path,
    state: search_states.SearchState,
    progress: bool,
    log_file: Path | None,
) -> Checkpoint:
    """Runs what is left of a search and saves its result."""
    first, run_key, best = state.first, state.first.run_key, list(state.best)
    train_data, validation_data = method.client_data("train"), method.client_data("validation")
    name = f"{method.algorithm.name} pivot run"
    with Progress(name, 0, method.plan.rounds, is_shown=progress, log_file=log_file) as shown:
        pivot = run_pivot(method, search, first, train_data, _shown_rounds(shown))
    numbers = numbers_of_runs(method, search, run_key)
    if progress:  # A bar would count the runs.
        print(f"{method.algorithm.name}: every silo searches by itself", file=sys.stderr)
    for run in range(state.runs_done + 1, max(numbers) + 1):
        places = [place for place, number in enumerate(numbers) if number >= run]
        states = repeat(method, search, pivot, first.client_states[0], run_key, run, places, train_data)
        scores = noisy_scores(method, search, pivot, run_key, run, places, states, validation_data)
        for place, client_state, score in zip(places, states, scores, strict=True):
            if score > best[place].score:
                best[place] = search_states.Best(client_state, score, run)
        search_states.save(folder / SEARCH, search_states.SearchState(first, best, run))
    result = dataclasses.replace(
        first,
        round_number=method.plan.rounds,
        server_state=pivot.server_states[-1],
        client_states=[
            one.client_state if one.run else own for one, own in zip(best, pivot.client_states, strict=True)
        ],
    )
    write_selected(folder, _selected(method, search, run_key, best))
    beside = surroundings_of(folder, (*FILES_BESIDE, SELECTED_FILE))
    checkpoints.save(folder / CHECKPOINTS, dataclasses.replace(result, surroundings=beside))
    return result


def _shown_rounds(shown: Progress) -> Iterator[int]:
    for number in range(1, shown.total + 1):
        yield number
        shown.round_done(number, "", None)


def _selected(
    method: Method, search: Search, run_key: RunKey, best: Sequence[search_states.Best]
) -> dict[str, dict[str, Any]]:
    """Returns what each silo releases of its search; the number of the silo's best run stays secret."""
    selected = {}
    for place, (client_id, one) in enumerate(zip(method.clients.client_ids, best, strict=True)):
        # Converted by way of text: 0.1 as a float32 is 0.10000000149.
        own = {name: float(str(method.hparams[name][place])) for name in search.candidates[0]}
        selected[client_id] = {
            "hparams": dict(candidate_of(search, run_key, client_id, one.run)) if one.run else own,
            "noisy_score": one.score if one.run else None,
        }
    return selected
