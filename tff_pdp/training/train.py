"""Trains a method. The code follows the flow of data: clients, plan, process, rounds, ledger, checkpoint."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.running import Engine
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.examples import Examples
from tff_pdp.experiment.method import Method
from tff_pdp.lock import only_writer
from tff_pdp.registry.entries import Registry
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.client_store.state_files import StateFiles, remove_far_files
from tff_pdp.training.client_store.states import close_states, is_store, moved_to_files, open_states
from tff_pdp.training.counted import check_newest, enter_run, planned_ledger, say_cost_so_far, settle, tell_registry
from tff_pdp.training.going_on import begin_extension, earlier_rounds, is_before_extension, plan_extension
from tff_pdp.training.progress import Progress
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import ChargesWriter, Extension, read_charges, run_id_of
from tff_pdp.training.record.releases import (
    CHECKPOINTS,
    SEARCH,
    STORE,
    check_files,
    check_record,
    set_aside,
    surroundings_of,
)
from tff_pdp.training.rounds import client_metrics, first_state, run_round, warning_of
from tff_pdp.training.run_folder import (
    FILES_BESIDE,
    check_beside,
    check_engine,
    checkpoints_were_every,
    cut_metrics,
    other_settings,
    start_folder,
    sweep,
)
from tff_pdp.training.spending import Choices, Spending, arithmetic_here, in_newest_attempt, open_run, take_over
from tff_pdp.training.tracking import RoundReports, Tracking, build_trackers
from tff_pdp.training.traffic import TrafficCount


def train(
    config: ExperimentConfig,
    name: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    log_file: Path | None = None,
) -> Checkpoint:
    """Trains one method of an experiment and returns its final state.

    A resumed run ends with the same bits as an uninterrupted run: a repeated round draws the same batches and noise,
    and so releases nothing new. If the bits may differ (another processor, version or setting, or a GPU without the
    evidence of `engines.devices.gpu_arithmetic`), rounds that may have been run already are run with new noise, and
    charged again.

    Guarantee: a round's cost is on disk before the round's noise is drawn (`tff_pdp.training.record`). The run is in
      the registry of all runs (`tff_pdp.registry`) before the run draws its first noise.

    Args:
      config: the experiment.
      name: name of the method in the experiment.
      resume: whether to continue from the newest checkpoint, if there is one; a run that has ended goes on if the
        experiment has more rounds (`training.going_on`).
      overwrite: whether to start again if a run exists; the old run's spending stays on record (`training.counted`).
      progress: whether to show the progress on standard error.
      log_file: file that lines on the progress are added to; None for no file.

    Raises:
      ConfigError: a run exists and neither `resume` nor `overwrite` is given, or the existing run has other settings.
      BudgetError: a round would overspend a silo's budget, and is not run; or nothing is left for further rounds.
      DataError, EngineError: a file is damaged, or the engine fails.
      KeyboardInterrupt: the user stopped the training; the text has the round, and the number of rounds that are kept.

    >>> train(config, "mr_mtl", resume=True, progress=False).round_number
    4
    """
    if config.tuning.search_for(name):
        raise ConfigError(
            f"{name} has hyper-parameters in tuning.search: run `tff-pdp tune`, or leave out tuning.search"
        )
    folder, trackers = config.algorithm_folder(name), build_trackers(config)
    with only_writer(folder):
        check_beside(folder, is_replaced=overwrite)
        further = plan_extension(config, name, folder) if resume and not overwrite else None
        earlier = earlier_rounds(config, name, folder) if resume and not overwrite else None
        method = build_method(config, name, earlier=further.earlier if further else earlier)
        method.trace()
        if overwrite:
            settle(config, folder)
            remove_far_files(folder / STORE)
            set_aside(folder.parent, folder)
            say_cost_so_far(config, method)
        choices = Choices(folder if resume else None)
        with experiment_engine(config, choices, config.training.rounds) as engine, contextlib.ExitStack() as stack:
            state, spending = _start_or_resume(config, method, folder, engine, resume, stack, further)
            choices.keep_by(spending.choose)
            train_data, validation_data = method.round_data("train"), method.round_data("validation")
            first_data = method.first_phase.round_data("train") if method.first_phase else train_data
            total, done = config.training.rounds, state.round_number
            rounds = range(done + 1, total + 1)
            traffic, reports = TrafficCount(method), RoundReports(method)
            shown = stack.enter_context(Progress(name, done, total, is_shown=progress, log_file=log_file))
            tracked = stack.enter_context(Tracking(config, name, state, run_id_of(folder) or "", trackers))
            stack.enter_context(_telling_where(name, folder, shown))
            if method.plan.warning:
                shown.warn(method.plan.warning)
            for round_number in rounds:
                spending.before_round(round_number)
                started = time.monotonic()
                own_data = train_data if method.at(round_number) is method else first_data
                state = run_round(method, state, round_number, own_data)
                seconds = time.monotonic() - started
                if round_number == rounds.start and (text := warning_of(method, state)):
                    shown.warn(text)
                is_last, report = round_number == total, None
                if is_last or round_number % config.training.evaluate_every == 0:
                    figures = _validation_metrics(config, method, state, validation_data, train_data)
                    sent = traffic.through(state.server_state["algorithm"], round_number)
                    report = reports.report(state, seconds, sent, figures)
                    tracked.round_done(report)
                shown.round_done(round_number, engine.condition(), report)
                if is_last or round_number % config.training.checkpoint_every == 0:
                    save(folder, state)
            spending.end(state)
            settle(config, folder)
        return state


@contextlib.contextmanager
def _telling_where(name: str, folder: Path, shown: Progress) -> Iterator[None]:
    """Adds to a KeyboardInterrupt the round in which the training was stopped, and how many rounds are kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept, reached = checkpoint_files.newest_round(folder / CHECKPOINTS), min(shown.reached + 1, shown.total)
        raise KeyboardInterrupt(f"{name}: in round {reached} of {shown.total}; {kept} rounds are kept") from None


def _start_or_resume(
    config: ExperimentConfig,
    method: Method,
    folder: Path,
    engine: Engine,
    resume: bool,
    stack: contextlib.ExitStack,
    further: Extension | None = None,
) -> tuple[Checkpoint, Spending]:
    """Returns the state to continue from, and the spending from there; the stack closes the files of both.

    `further` is the extension to begin, if the run has ended and the experiment has more rounds.
    """
    saved = checkpoints.load_latest(folder / CHECKPOINTS)
    arithmetic, device = arithmetic_here(config, engine), engine.device
    if saved is None:
        if (folder / SEARCH).exists():
            raise ConfigError(f"{folder} holds an unfinished `tff-pdp tune`: give --overwrite to train there instead")
        settle(config, folder)
        start_folder(config, folder, device)
        first = first_state(method, config.training.test_only_seed, folder / STORE, _states_root(config))
        stack.callback(close_states, first.client_states)
        writer = stack.enter_context(ChargesWriter(folder))
        open_run(writer, method, first)
        enter_run(config, method, folder, writer.begun, planned_ledger(method.plan, first))
        tell_registry(config, writer.begun)
        # Saved before anything is released: if the key were lost, the first rounds would run again with new noise.
        save(folder, first)
        return first, Spending(writer, method.plan, first, arithmetic, Registry(config.privacy.registry))
    if not resume:
        raise ConfigError(
            f"{folder} holds a run already (round {saved.round_number}): give --resume or --overwrite; --overwrite "
            "throws these rounds away, but their cost stays on record"
        )
    is_extended = further is not None or is_before_extension(folder, method, saved)
    if not is_extended and not saved.was_made_with(method.config_hash):
        raise ConfigError(other_settings(config, method.algorithm.name, folder, f"{saved.round_number} rounds"))
    check_record(folder, saved, read_charges(folder))
    check_files(folder, saved)
    check_engine(config, folder, device)
    sweep(folder)
    writer = stack.enter_context(ChargesWriter(folder))
    if saved.surroundings is None:
        take_over(writer, method, saved, arithmetic, checkpoints_were_every(folder))
    check_newest(config, folder, writer.begun)
    if further is not None:
        begin_extension(writer, method, saved, further)
    saved = in_newest_attempt(method, saved, writer, arithmetic)
    enter_run(config, method, folder, writer.begun, planned_ledger(method.plan, saved))
    tell_registry(config, writer.begun)
    if saved.client_states is None:
        store = open_states(folder / STORE, saved.round_number, saved.run_key.attempt)
        stack.callback(close_states, store)
        # A run that was killed after its last round may have left older states.
        store.prune(checkpoints.oldest_kept(folder / CHECKPOINTS))
        saved = dataclasses.replace(saved, client_ids=tuple(method.clients.client_ids), client_states=store)
    if method.is_at_workers and not isinstance(saved.client_states, StateFiles):
        default = method.process.init_client(saved.server_state)
        files = moved_to_files(
            saved.client_states,
            folder / STORE,
            default,
            saved.round_number,
            _states_root(config),
            saved.run_key.attempt,
        )
        saved = dataclasses.replace(saved, client_states=files)
    # Rounds after the checkpoint are run again, and write their metrics again.
    cut_metrics(folder, saved.round_number)
    return saved, Spending(writer, method.plan, saved, arithmetic, Registry(config.privacy.registry))


def save(folder: Path, state: Checkpoint) -> None:
    """Saves a checkpoint in a run's folder, and deletes states of users that no kept checkpoint needs."""
    beside = surroundings_of(folder, FILES_BESIDE)
    if isinstance(state.client_states, StateFiles):
        state.client_states.save()
    checkpoints.save(folder / CHECKPOINTS, dataclasses.replace(state, surroundings=beside))
    if is_store(state.client_states):
        state.client_states.prune(checkpoints.oldest_kept(folder / CHECKPOINTS))


def _states_root(config: ExperimentConfig) -> str:
    return config.training.workers.states if config.training.workers else ""


def _validation_metrics(
    config: ExperimentConfig,
    method: Method,
    state: Checkpoint,
    data: Examples | ClientValues,
    train_data: Examples | ClientValues,
) -> dict[str, np.ndarray] | None:
    """Returns exact metrics of personal models on validation examples; None where they are switched off."""
    if not config.training.nonprivate_metrics:
        return None
    return client_metrics(method, state, data, train_data)["personal"]
