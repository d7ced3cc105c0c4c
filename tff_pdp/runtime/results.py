"""Test metrics of trained methods, and the report made of them."""

import datetime
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.config import ExperimentConfig
from tff_pdp.errors import ConfigError
from tff_pdp.files import replace_text
from tff_pdp.privacy.ledger import compose_worst_case
from tff_pdp.privacy.silo_example_plan import GRADIENTS
from tff_pdp.reports.content import AlgorithmResult, Report, SiloResult
from tff_pdp.reports.html import write_report
from tff_pdp.reports.numbers import plain
from tff_pdp.reports.privacy_statement import build_privacy_statement
from tff_pdp.reports.summary import mean_over_examples, mean_over_silos, spread, worst_decile
from tff_pdp.runtime import checkpoint as checkpoints
from tff_pdp.runtime import releases
from tff_pdp.runtime.checkpoint import Checkpoint
from tff_pdp.runtime.client_states import close_states
from tff_pdp.runtime.client_store import ClientStore
from tff_pdp.runtime.experiment import build_method, experiment_engine
from tff_pdp.runtime.method import Method
from tff_pdp.runtime.releases import all_ledgers
from tff_pdp.runtime.rounds import evaluate_clients
from tff_pdp.runtime.train import read_metrics

# What the summary repeats of the report's privacy statement.
PRIVACY_KEYS = ("unit", "adjacency", "claim", "claim_reason", "private", "composed")

Trained = tuple[Method, Checkpoint]


def load_trained(config: ExperimentConfig, name: str) -> Trained:
    """Returns a method and its final state.

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
    method = build_method(config, name)
    if state.config_hash != method.config_hash:
        raise ConfigError(f"{folder} was trained with other settings or other data: train again with --overwrite")
    if method.user_plan is not None:
        store = ClientStore.open(folder / releases.STORE)
        state = checkpoints.with_store(state, method.clients.client_ids, store)
    return method, state


def evaluate_experiment(config: ExperimentConfig, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Tests the personal models, writes `report.html` and `summary.json`, and returns the summary.

    Raises:
      ConfigError: a method has not been trained.
    """
    trained = {name: load_trained(config, name) for name in names or config.algorithms}
    metrics = {}
    with experiment_engine(config):
        for name, (method, state) in trained.items():
            metrics[name] = evaluate_clients(method, state, method.examples("test"), method.examples("train"))
            close_states(state.client_states)
    algorithms = tuple(_algorithm_result(config, *trained[name], metrics[name]) for name in trained)
    silos = _silo_results(list(trained.values()), metrics)
    report = Report(
        title=config.title,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metric=next(iter(trained.values()))[0].model.metric,
        algorithms=algorithms,
        silos=silos,
        privacy=_statement(config, list(trained.values()), algorithms, silos),
        config=config.to_dict(),
    )
    write_report(report, Path(config.output) / "report.html")
    summary = _summary(report)
    write_summary(Path(config.output), summary)
    return summary


def summary_table(summary: dict[str, Any]) -> str:
    """The headline figures as a small text table."""
    direction = "higher" if summary["higher_is_better"] else "lower"
    columns = {
        "mean over silos": "mean",
        "over examples": "mean_over_examples",
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
    # Numbers that JSON cannot hold are words there: "inf", "nan".
    spent = [float(silo["epsilon_spent"]) for silo in summary["silos"]]
    lines.append(f"{len(spent)} silos; each method spent between {min(spent):.2f} and {max(spent):.2f} of epsilon")
    return "\n".join(lines)


def write_summary(output: Path, summary: dict[str, Any]) -> None:
    """Writes `summary.json`."""
    replace_text(output / "summary.json", json.dumps(summary, indent=2) + "\n")


def _algorithm_result(config: ExperimentConfig, method: Method, state: Checkpoint, metrics: Any) -> AlgorithmResult:
    metric, clients = method.model.metric, method.clients
    personal = [float(client["personal"][metric.example_name]) for client in metrics.values()]
    shared = [float(client["global"][metric.example_name]) for client in metrics.values() if "global" in client]
    history = read_metrics(config.algorithm_folder(method.algorithm.name))
    return AlgorithmResult(
        name=method.algorithm.name,
        title=method.algorithm.title,
        mean=mean_over_silos(personal),
        mean_over_examples=mean_over_examples(
            personal, [clients.num_examples(client_id, "test") for client_id in metrics]
        ),
        worst_decile=worst_decile(personal, metric),
        spread=spread(personal).standard_deviation,
        shared_mean=mean_over_silos(shared) if shared else None,
        # A method whose hyper-parameters were searched has none: exact metrics are not released on the way.
        history=tuple((row["round"], float(row["mean"])) for row in history),
        rounds=state.round_number,
        seconds_per_round=float(np.median([row["seconds"] for row in history])) if history else math.nan,
        claim=method.plan.claim,
        claim_reason=method.plan.claim_reason,
        exported=method.algorithm.name == config.export.algorithm,
    )


def _silo_results(trained: Sequence[Trained], metrics: Any) -> tuple[SiloResult, ...]:
    """One row per silo; where methods spent differently, the one that spent most."""
    return tuple(_silo_result(client_id, trained, metrics) for client_id in trained[0][0].clients.client_ids)


def _silo_result(client_id: str, trained: Sequence[Trained], metrics: Any) -> SiloResult:
    def spent(pair: Trained) -> float:
        method, state = pair
        return method.plan.guaranteed_epsilon(state.ledger, client_id).best if state.ledger else math.inf

    method, state = max(trained, key=spent)
    mechanism = method.plan.mechanisms[client_id]
    budget = method.plan.budgets.get(client_id)
    measured = method.model.metric.example_name
    bounds = method.plan.guaranteed_epsilon(state.ledger, client_id) if state.ledger else None
    return SiloResult(
        id=client_id,
        num_train=method.plan.num_examples[client_id],
        num_test=method.clients.num_examples(client_id, "test"),
        epsilon_target=budget.epsilon if budget else math.inf,
        epsilon_spent=bounds.best if bounds else math.inf,
        epsilon_rdp=_number(bounds.rdp if bounds else math.inf),
        epsilon_pld=_number(bounds.pld if bounds else math.inf),
        delta=budget.delta if budget else 0.0,
        noise_multiplier=mechanism.noise_multiplier,
        sampling_rate=mechanism.sampling_rate,
        last_round=method.plan.last_rounds[client_id],
        personal={name: float(rows[client_id]["personal"][measured]) for name, rows in metrics.items()},
        shared={
            name: float(rows[client_id]["global"][measured]) if "global" in rows[client_id] else None
            for name, rows in metrics.items()
        },
    )


def _statement(
    config: ExperimentConfig,
    trained: Sequence[Trained],
    algorithms: Sequence[AlgorithmResult],
    silos: Sequence[SiloResult],
) -> dict[str, Any]:
    ledgers = all_ledgers(Path(config.output)) if all(state.ledger for _, state in trained) else []
    are_noised = any(method.plan.num_examples_are_noised for method, _ in trained)
    delta = max(silo.delta for silo in silos)
    if are_noised:
        # Budgets hold whatever number was released, and so does their sum.
        composed = max(sum(ledger.budgets[silo.id].epsilon for ledger in ledgers) for silo in silos)
        delta *= len(ledgers)
    else:
        composed = max(compose_worst_case(ledgers, silo.id).best for silo in silos) if ledgers else None
    return build_privacy_statement(
        algorithms=algorithms,
        silos=silos,
        clip=config.privacy.clip_norm,
        sampler=trained[0][0].plan.sampler,
        other_releases=_other_releases([state for _, state in trained]),
        num_examples_are_noised=are_noised,
        steps=max(max(method.plan.gradients_per_round.values()) * method.plan.rounds for method, _ in trained),
        tuned=config.tuning.tuned,
        configurations_tried=config.tuning.configurations_tried,
        search=_search(config, trained),
        if_charged=_if_charged(config, trained, silos),
        composed_epsilon=composed,
        composed_delta=delta if ledgers else None,
        recorded_runs=len(ledgers) or None,
        known_seed=any(state.run_key.is_test_only for _, state in trained),
    )


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


def _if_charged(
    config: ExperimentConfig, trained: Sequence[Trained], silos: Sequence[SiloResult]
) -> dict[str, float] | None:
    """What the silo that spent most would have spent, had every configuration tried been a release."""
    tried = config.tuning.configurations_tried
    worst = max(silos, key=lambda silo: silo.epsilon_spent)
    ledgers = [state.ledger for _, state in trained if state.ledger]
    if tried < 2 or not ledgers or not math.isfinite(worst.epsilon_spent):
        return None
    costliest = max(ledgers, key=lambda ledger: ledger.epsilon(worst.id).best)
    return {"epsilon": compose_worst_case([costliest] * tried, worst.id).best, "delta": worst.delta}


def _summary(report: Report) -> dict[str, Any]:
    content = report.to_dict()
    return {
        "title": report.title,
        "metric": report.metric.name,
        "higher_is_better": report.metric.higher_is_better,
        "algorithms": {
            row["name"]: {key: value for key, value in row.items() if key not in ("name", "history", "title")}
            for row in content["algorithms"]
        },
        "silos": content["silos"],
        "privacy": {key: content["privacy"][key] for key in PRIVACY_KEYS},
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value
