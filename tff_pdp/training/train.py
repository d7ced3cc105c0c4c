"""The training loop, in the order data flows: clients, plan, process, rounds, ledger, checkpoint."""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.examples import Examples
from tff_pdp.experiment.method import Method
from tff_pdp.files import replace_text
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.summary import mean_over_silos
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training import costs as releases
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.client_store.states import close_states, is_store
from tff_pdp.training.client_store.store import ClientStore
from tff_pdp.training.rounds import evaluate_clients, first_state, run_round

# How the clients of each computation are computed, where the engine has chosen.
CHOICES_FILE = "client_parallelism.json"


def train(
    config: ExperimentConfig, name: str, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> Checkpoint:
    """Trains one method of an experiment and returns its final state.

    A run that was stopped and resumed on the same machine's CPU ends with the same bits as one that was not: a repeated
    round draws the same batches and the same noise, so repeating it releases nothing new. (On a GPU the draws are the
    same, but sums may round differently.)

    Args:
      config: the experiment.
      name: which of its methods.
      resume: continue from the newest checkpoint, where there is one.
      overwrite: start again where a run exists. What the old run spent stays on record (`training.costs`).
      progress: show a progress bar.

    Raises:
      ConfigError: a run exists already and neither `resume` nor `overwrite` is given, or its settings were others.
      BudgetError: a round would overspend a silo's budget; it is not run.
      DataError, EngineError: as their parts raise.
    """
    if config.tuning.search_for(name):
        raise ConfigError(
            f"{name}: tuning.search chooses its hyper-parameters. Run `tff-pdp tune`, or leave out the search"
        )
    method = build_method(config, name)
    folder = config.algorithm_folder(name)
    if overwrite:
        releases.set_aside(Path(config.output), folder)
    choices = read_choices(folder) if resume else {}
    saved_choices = dict(choices)
    with experiment_engine(config, choices) as engine, contextlib.ExitStack() as stack:
        state = _start_or_resume(config, method, folder, engine.device, resume, stack)
        train_data, validation_data = method.round_data("train"), method.round_data("validation")
        warn(method)
        rounds = range(state.round_number + 1, config.training.rounds + 1)
        total, done = config.training.rounds, state.round_number
        for round_number in tqdm(rounds, name, total, initial=done, unit="round", disable=not progress):
            started = time.monotonic()
            state = run_round(method, state, round_number, train_data)
            seconds = time.monotonic() - started
            is_last = round_number == config.training.rounds
            if is_last or round_number % config.training.evaluate_every == 0:
                metrics = _validation_metrics(method, state, validation_data, train_data)
                _append_metrics(folder, round_number, {"seconds": seconds, **metrics})
            if choices != saved_choices:
                # Other ways to compute round differently: a run that is resumed has to go on in the same way.
                saved_choices = write_choices(folder, choices)
            if is_last or round_number % config.training.checkpoint_every == 0:
                save(folder, state)
    return state


def _start_or_resume(
    config: ExperimentConfig, method: Method, folder: Path, device: str, resume: bool, stack: contextlib.ExitStack
) -> Checkpoint:
    """The state to go on from; the stack closes its store."""
    saved = checkpoints.load_latest(folder / "checkpoints")
    if saved is None:
        if (folder / releases.SEARCH).exists():
            raise ConfigError(f"{folder} holds an unfinished `tff-pdp tune`: give --overwrite to train there instead")
        start_folder(config, folder, device)
        store_folder = folder / releases.STORE
        # A run that was killed before its first checkpoint has left one without anything in it.
        shutil.rmtree(store_folder, ignore_errors=True)
        first = first_state(method, config.training.test_only_seed, store_folder)
        stack.callback(close_states, first.client_states)
        # Saved before anything is released: were the key lost, running the first rounds again would draw new noise.
        save(folder, first)
        return first
    if not resume:
        raise ConfigError(f"{folder} holds a run already (round {saved.round_number}): give --resume or --overwrite")
    if saved.config_hash != method.config_hash:
        raise ConfigError(f"{folder} was trained with other settings or other data: give --overwrite to start again")
    check_engine(config, folder, device)
    if saved.ledger is not None:
        method.plan.precheck_rest(saved.ledger)
    if method.user_plan is not None:
        store = stack.enter_context(ClientStore.open(folder / releases.STORE))
        store.rewind(saved.round_number)
        # A run that was killed after its last checkpoint, while states were pruned, has no later round that would.
        store.prune(checkpoints.oldest_kept(folder / "checkpoints"))
        saved = checkpoints.with_store(saved, method.clients.client_ids, store)
    # Rounds after the checkpoint are run again, and write their metrics again.
    rows = [row for row in read_metrics(folder) if row["round"] <= saved.round_number]
    replace_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return saved


def warn(method: Method) -> None:
    """Says on stderr what the plan has to say before training, such as that its noise is too much."""
    if method.plan.warning:
        print(f"{method.algorithm.name}: warning: {method.plan.warning}", file=sys.stderr)


def save(folder: Path, state: Checkpoint) -> None:
    """Saves a checkpoint in a run's folder; a store keeps no more than what the kept checkpoints need."""
    checkpoints.save(folder / "checkpoints", state)
    if is_store(state.client_states):
        state.client_states.prune(checkpoints.oldest_kept(folder / "checkpoints"))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Reads the validation metrics a run has written: one row for each evaluated round."""
    # A process that was killed while writing leaves a last line without its end.
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def start_folder(config: ExperimentConfig, folder: Path, device: str) -> None:
    """Makes a run's folder, with the resolved experiment and without metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_resolved(config, device), indent=2))
    (folder / "metrics.jsonl").write_text("")


def check_engine(config: ExperimentConfig, folder: Path, device: str) -> None:
    """Refuses to repeat rounds with other rounding: their noise, which is the same, would not hide the difference.

    Raises:
      ConfigError: the run was started in another way.
    """
    started_with = json.loads((folder / "config.json").read_text())["training"]
    content = _resolved(config, device)["training"]
    for key in ("engine", "device", "client_parallelism", "clients_per_call"):
        if started_with[key] != content[key]:
            raise ConfigError(
                f"{folder} was started with training.{key} {started_with[key]!r}, not {content[key]!r}: resume it in "
                "the same way, or give --overwrite to start again"
            )


def read_choices(folder: Path) -> dict[str, str]:
    """Reads how the clients of each computation are computed, where the engine has chosen."""
    path = folder / CHOICES_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def write_choices(folder: Path, choices: Mapping[str, str]) -> dict[str, str]:
    """Writes what `read_choices` reads, and returns a copy."""
    replace_text(folder / CHOICES_FILE, json.dumps(choices, indent=2) + "\n")
    return dict(choices)


def _resolved(config: ExperimentConfig, device: str) -> dict[str, Any]:
    """The experiment as plain data, with the device that it runs on in place of the one asked for."""
    content = config.to_dict()
    content["training"]["device"] = device
    return content


def _validation_metrics(
    method: Method, state: Checkpoint, data: Examples | ClientValues, train_data: Examples | ClientValues
) -> dict[str, Any]:
    metric = method.model.metric
    clients = evaluate_clients(method, state, data, train_data).values()
    mean = mean_over_silos(float(client["personal"][metric.example_name]) for client in clients)
    return {"metric": metric.name, "higher_is_better": metric.higher_is_better, "mean": json_safe(mean)}


def _append_metrics(folder: Path, round_number: int, metrics: Mapping[str, Any]) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"round": round_number, "split": "validation", **metrics}) + "\n")
