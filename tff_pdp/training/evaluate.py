"""Tests trained methods, and writes the report of their metrics.

Ranking metrics, such as average precision, are computed from the test examples of all clients together. The personal
model of each client scores the client's own examples.
"""

import contextlib
import dataclasses
import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.examples import Examples
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.synthetic_data import synthetic_images
from tff_pdp.files import replace_text
from tff_pdp.models.metrics import Metric
from tff_pdp.privacy.facts import MethodFacts
from tff_pdp.reports.advice import advice_on, advice_on_search
from tff_pdp.reports.content import AlgorithmResult, ClientScores, Report, SyntheticImages, json_safe
from tff_pdp.reports.html import write_report
from tff_pdp.reports.statement import statement
from tff_pdp.reports.summary import (
    left_out_notes,
    mean_over_examples,
    mean_over_silos,
    pooled_notes,
    spread,
    summary_content,
    worst_decile,
)
from tff_pdp.reports.words import SILOS, USERS, between, plain, upper
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.client_store.states import close_states, open_states
from tff_pdp.training.counted import enter_finished
from tff_pdp.training.going_on import earlier_rounds
from tff_pdp.training.privacy_facts import Trained, facts_of
from tff_pdp.training.record.charges import read_charges, run_id_of
from tff_pdp.training.record.releases import STORE, check_files, check_record
from tff_pdp.training.rounds import calls_of_evaluation, client_metrics, ready_states, warning_of
from tff_pdp.training.run_folder import other_settings, read_metrics, read_selected, validation_means


def load_trained(config: ExperimentConfig, name: str) -> Trained:
    """Loads a trained method and its final state.

    Raises:
      ConfigError: the method has not been trained to its last round with these settings.
    """
    folder = config.algorithm_folder(name)
    state = checkpoints.load_latest(folder / "checkpoints")
    if state is None or state.round_number < config.training.rounds:
        done = state.round_number if state else 0
        command = "tune" if config.tuning.search_for(name) else "train"
        raise ConfigError(
            f"{name} has {done} of {config.training.rounds} rounds in {folder}: run `tff-pdp {command} --resume` first"
        )
    charges = read_charges(folder)
    check_record(folder, state, charges)
    check_files(folder, state)
    method = build_method(config, name, earlier=earlier_rounds(config, name, folder))
    if not state.was_made_with(method.config_hash):
        raise ConfigError(other_settings(config, name, folder, f"{state.round_number} rounds"))
    enter_finished(config, method, folder, charges)
    if state.client_states is None:
        store = open_states(folder / STORE)
        if store.round_number > state.round_number or store.num_clients != len(method.clients.client_ids):
            store.close()
            raise DataError(f"{store.folder} holds the states of another run: restore the folder, or train again")
        state = dataclasses.replace(state, client_ids=tuple(method.clients.client_ids), client_states=store)
    return method, state


def evaluate_experiment(config: ExperimentConfig, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Tests the personal models, writes `report.html` and `summary.json`, and returns the summary.

    If the model defines a ranking metric, summary and report also state the metric for the test examples of all
    clients together, for example `pooled_average_precision`.

    Raises:
      ConfigError: a method has not been trained.

    >>> list(evaluate_experiment(config, ["mr_mtl"])["algorithms"])
    ['mr_mtl']
    """
    trained, metrics, pooled = {}, {}, {}
    with contextlib.ExitStack() as stack:
        for name in names or config.algorithms:
            trained[name] = load_trained(config, name)
            stack.callback(close_states, trained[name][1].client_states)
        calls = max(calls_of_evaluation(state) for _, state in trained.values())
        stack.enter_context(experiment_engine(config, calls=calls))
        for name, (method, state) in trained.items():
            test, train = method.examples("test"), method.examples("train")
            metrics[name] = client_metrics(method, state, test, train)
            pooled[name] = pooled_figures(method, state, test, train)
    report = _report(config, list(trained.values()), metrics, pooled)
    write_report(report, Path(config.output) / "report.html")
    summary = summary_content(report)
    for name, figures in pooled.items():
        summary["algorithms"][name].update(json_safe(figures))
        # The id by which `tff-pdp verify` finds the ledger that the figures were made from.
        summary["algorithms"][name]["run"] = run_id_of(config.algorithm_folder(name))
    write_summary(Path(config.output), summary)
    return summary


def summary_table(summary: dict[str, Any]) -> str:
    """Formats the headline metrics as a small text table."""
    direction = "higher" if summary["higher_is_better"] else "lower"
    clients = "silos" if "silos" in summary else "users"
    pooled = f"pooled_{summary['metric']}"
    is_ranking = all(pooled in row for row in summary["algorithms"].values())
    columns = {
        f"mean over {clients}": "mean",
        # A ranking has no mean over examples, only a mean over clients weighted by their numbers of examples.
        "weighted mean" if is_ranking else "over examples": "mean_over_examples",
        **({"all together": pooled} if is_ranking else {}),
        "worst decile": "worst_decile",
        "shared model": "shared_mean",
    }
    lines = [
        f"test {summary['metric'].replace('_', ' ')}, {direction} is better",
        f"{'method':<16}" + "".join(f" {heading:>15}" for heading in columns),
    ]
    for name, row in summary["algorithms"].items():
        figures = (None if row[key] is None else float(row[key]) for key in columns.values())
        lines.append(f"{name:<16}" + "".join(f" {plain(figure):>15}" for figure in figures))
    lines += [_cost_line(summary), *(f"note: {note}" for note in summary["notes"])]
    # Summaries of earlier versions have no advice.
    return "\n".join([*lines, *(f"advice: {advice}" for advice in summary.get("advice", ()))])


def write_summary(output: Path, summary: dict[str, Any]) -> None:
    """Writes `summary.json`."""
    replace_text(output / "summary.json", json.dumps(summary, indent=2) + "\n")


def _cost_line(summary: dict[str, Any]) -> str:
    """States what each method spent on every silo, or for users."""
    silos = summary.get("silos")
    if silos is not None:
        spent, clients = [silo["epsilon_spent"] for silo in silos], f"{len(silos)} silos"
    else:
        spent, clients = [summary["privacy"]["users"]["epsilon_spent"]], f"{summary['num_users']} users"
    if None in spent:
        return f"{clients}; claim: none, and no epsilon: {summary['privacy']['claim_reason']}"
    if silos is not None:
        return f"{clients}; each method spent {between(spent, upper)} of epsilon"
    delta = summary["privacy"]["users"]["delta"]
    return f"{clients}; each method spent at most {upper(spent[0])} of epsilon, at delta {delta:g}"


def _report(
    config: ExperimentConfig, trained: Sequence[Trained], metrics: Any, pooled: Mapping[str, Mapping[str, float]]
) -> Report:
    first, _ = trained[0]
    facts = facts_of(config, trained)
    scores = _scores(first, metrics)
    words = USERS if facts.are_users else SILOS
    warnings = [
        (method, text) for method, state in trained for text in (method.plan.warning, warning_of(method, state))
    ]
    notes = [f"{method.algorithm.title}: {text}" for method, text in warnings if text]
    notes += left_out_notes(first.model.metric, scores, words)
    by_title = {method.algorithm.title: pooled[method.algorithm.name] for method, _ in trained}
    notes += pooled_notes(first.model.metric, by_title, words)
    report = Report(
        title=config.title,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metric=first.model.metric,
        algorithms=tuple(
            _algorithm_result(config, own, method, state, metrics[own.name])
            for own, (method, state) in zip(facts.methods, trained, strict=True)
        ),
        clients=scores,
        privacy=statement(facts),
        config=config.to_dict(),
        notes=tuple(notes),
        synthetic=_synthetic(config, first),
    )
    return dataclasses.replace(report, advice=(*advice_on(report), *_search_advice(config, trained)))


def _search_advice(config: ExperimentConfig, trained: Sequence[Trained]) -> list[str]:
    """Returns advice on the private search among these methods' hyper-parameters, if there was one."""
    search, names = config.tuning.search, [method.algorithm.name for method, _ in trained]
    if search is None or search.algorithm not in names:
        return []
    return advice_on_search(read_selected(config.algorithm_folder(search.algorithm)), search.values)


def _synthetic(config: ExperimentConfig, method: Method) -> tuple[SyntheticImages, ...]:
    section, phase = config.privacy.synthetic, method.first_phase
    if section is None or phase is None:
        return ()
    value_range = (section.generator.low, section.generator.high)
    return tuple(
        SyntheticImages(client_id, images.x, images.y, value_range)
        for client_id, images in synthetic_images(phase.source).items()
    )


def _algorithm_result(
    config: ExperimentConfig, facts: MethodFacts, method: Method, state: Checkpoint, metrics: Any
) -> AlgorithmResult:
    metric, clients = method.model.metric, method.clients
    personal, shared = (_measured(metrics, kind, metric) for kind in ("personal", "global"))
    history = read_metrics(config.algorithm_folder(facts.name))
    return AlgorithmResult(
        facts=facts,
        mean=mean_over_silos(personal),
        mean_over_examples=mean_over_examples(personal, clients.sizes("test").tolist()),
        worst_decile=worst_decile(personal, metric),
        spread=spread(personal),
        shared_mean=mean_over_silos(shared) if shared else None,
        # A searched method has no history: exact metrics are not released on the way.
        history=tuple(validation_means(history)),
        rounds=state.round_number,
        seconds_per_round=float(np.median([row["seconds"] for row in history])) if history else math.nan,
    )


def _measured(metrics: Any, kind: str, metric: Metric) -> list[float]:
    """Returns each client's value of a metric; an empty list if there are no metrics of this kind."""
    return metrics[kind][metric.example_name].tolist() if kind in metrics else []


def _scores(method: Method, metrics: Any) -> tuple[ClientScores, ...]:
    metric, client_ids = method.model.metric, method.clients.client_ids
    personal = {name: _measured(own, "personal", metric) for name, own in metrics.items()}
    shared = {name: _measured(own, "global", metric) or [None] * len(client_ids) for name, own in metrics.items()}
    return tuple(
        ClientScores(
            id=client_id,
            num_test=num_test,
            personal={name: values[place] for name, values in personal.items()},
            shared={name: values[place] for name, values in shared.items()},
        )
        for place, (client_id, num_test) in enumerate(
            zip(client_ids, method.clients.sizes("test").tolist(), strict=True)
        )
    )


def pooled_figures(
    method: Method, state: Checkpoint, data: Examples | ClientValues, train_data: Examples | ClientValues | None = None
) -> dict[str, float]:
    """Returns the ranking metric over all clients' examples together, under its name. Needs an engine.

    An example of a name is `pooled_average_precision`; the result is empty for models without a ranking metric. Unlike
    a mean over clients, the metric also compares scores of different clients' models. The value is exact, hence not
    private, and NaN if no client has a positive example. `data` are held-out examples; `train_data` are training
    examples, for users that adapt before predictions.
    """
    ranking = method.model.ranking
    if ranking is None:
        return {}
    parts = list(client_scores(method, state, data, train_data))
    scores, labels = (np.concatenate([part[index] for part in parts] or [np.empty(0)]) for index in (0, 1))
    return {f"pooled_{ranking.metric.name}": ranking.pooled(scores, labels)}


def client_scores(
    method: Method, state: Checkpoint, data: Examples | ClientValues, train_data: Examples | ClientValues | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields each non-empty client's float32 scores and int64 labels, `[examples]`; args as in `pooled_figures`."""
    for places, states in ready_states(method, state, train_data):
        own_data = data if isinstance(data, ClientValues) else data.select(places)
        for weights, examples in zip(method.process.personalise(state.server_state, states), own_data, strict=True):
            size = int(examples["num_examples"])
            # Some operations give an empty batch a wrong shape.
            if size:
                outputs = method.model.predict(weights, tf.constant(examples["x"][:size]))
                yield np.asarray(method.model.scores(outputs)), examples["y"][:size]
