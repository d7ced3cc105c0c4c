"""What each command does: read the experiment, call the part that does the work, say where the outputs are."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tff_pdp.config import ExperimentConfig, load_config
from tff_pdp.errors import ConfigError


def prepare(options: argparse.Namespace) -> int:
    """Runs the preprocessing job of the experiment."""
    from tff_pdp.runtime.prepare import prepare_clients

    summary = prepare_clients(_config(options), overwrite=options.overwrite)
    _show(options, summary.as_dict(), summary.table())
    return 0


def train(options: argparse.Namespace) -> int:
    """Trains the chosen methods, one after the other."""
    from tff_pdp.runtime.train import train as train_method

    config = _config(options)
    done: dict[str, Any] = {}
    # A method with a search is trained by `tune`; asked for by its name, it is refused.
    others = [name for name in config.algorithms if not config.tuning.search_for(name)]
    names = options.algorithm or others or list(config.algorithms)
    for name in names:
        if name not in config.algorithms:
            raise ConfigError(
                f"--algorithm {name!r} is not in this experiment, which has: {', '.join(config.algorithms)}"
            )
    for name in names:
        state = train_method(config, name, resume=options.resume, overwrite=options.overwrite)
        done[name] = {"rounds": state.round_number, "folder": str(config.algorithm_folder(name))}
    _show(options, done, "\n".join(f"{name}: {row['rounds']} rounds, in {row['folder']}" for name, row in done.items()))
    return 0


def tune(options: argparse.Namespace) -> int:
    """Searches the hyper-parameters of one method, at a cost that its ledger is charged for."""
    from tff_pdp.runtime.tune import tune as tune_method
    from tff_pdp.runtime.tune import tune_summary, tune_text

    config = _config(options, _search_overrides(options))
    if config.tuning.search is None:
        raise ConfigError("nothing to search: give tuning.search in the configuration, or --algorithm and --values")
    tuned = tune_method(config, config.tuning.search.algorithm, resume=options.resume, overwrite=options.overwrite)
    summary = tune_summary(config, tuned)
    _show(options, summary, tune_text(summary))
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Tests the personal models and writes the report."""
    from tff_pdp.runtime.results import evaluate_experiment, summary_table

    config = _config(options)
    summary = evaluate_experiment(config, options.algorithm)
    _show(options, summary, f"{summary_table(summary)}\nreport: {Path(config.output) / 'report.html'}")
    return 0


def export(options: argparse.Namespace) -> int:
    """Exports the experiment's chosen method."""
    from serving.tf_serving import docker_command, write_models_config
    from tff_pdp.runtime.export import export_experiment

    config = _config(options)
    version = export_experiment(config)
    models_config = write_models_config(version.parent, config.export.model_name)
    content = {"version": str(version), "models_config": str(models_config)}
    _show(
        options,
        content,
        f"exported: {version}\nserve it here: tff-pdp serve --model-base-path {version.parent}\n"
        f"in production: {docker_command(version.parent, config.export.model_name)}",
    )
    return 0


def serve(options: argparse.Namespace) -> int:
    """Serves an export until interrupted."""
    from serving.server import EmbeddedServer

    base_path = Path(options.model_base_path)
    name = options.model_name or base_path.resolve().name
    with EmbeddedServer(base_path, name, rest_port=options.rest_port, grpc_port=options.grpc_port) as server:
        print(server.banner, flush=True)
        server.wait()
    return 0


def predict(options: argparse.Namespace) -> int:
    """Sends some test examples to a server and prints what comes back."""
    from serving.client import GrpcClient, RestClient
    from tff_pdp.data.client_dataset import ClientDataset

    config = _config(options)
    clients = ClientDataset.open(config.clients_folder)
    examples = clients.load(options.examples_of or options.client_id, "test")
    x, y = examples.x[: options.num_examples], examples.y[: options.num_examples]
    client = GrpcClient(options.address) if options.grpc else RestClient(options.address)
    prediction = client.predict(config.export.model_name, [options.client_id] * len(x), x)
    answers = zip(y, prediction.answers, prediction.personalized, strict=True)
    rows = [{**_answer(label, answer), "personalized": bool(own)} for label, answer, own in answers]
    _show(
        options,
        {"client_id": options.client_id, "predictions": rows},
        "\n".join(
            f"label {row['label']:g}: predicted {row['predicted']:g}"
            + (f" with probability {row['probability']:.3f}" if "probability" in row else "")
            + f" by the {'personal' if row['personalized'] else 'global'} model"
            for row in rows
        ),
    )
    return 0


def demo(options: argparse.Namespace) -> int:
    """Runs the whole demo."""
    from tff_pdp.demo import run_demo

    summary, text = run_demo(Path(options.output), options.data, _engine_overrides(options))
    _show(options, summary, text)
    return 0 if summary["served_equals_in_process"] else 1


def reproduce(options: argparse.Namespace) -> int:
    """Repeats a published experiment."""
    from tff_pdp.reproduce.reproduction import reproduce as run_reproduction

    content, text = run_reproduction(options)
    _show(options, content, text)
    return 1 if content["failures"] else 0


def doctor(options: argparse.Namespace) -> int:
    """Looks at the installation."""
    from tff_pdp.doctor import examine

    content, text = examine()
    _show(options, content, text)
    return 0 if content["healthy"] else 1


def _answer(label: Any, answer: Any) -> dict[str, Any]:
    """One example's label and prediction, of a classifier (probabilities `[num_classes]`) or a regression (a value)."""
    if answer.ndim:
        return {"label": int(label), "predicted": int(answer.argmax()), "probability": float(answer.max())}
    return {"label": float(label), "predicted": float(answer)}


def _config(options: argparse.Namespace, further: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Reads the experiment, with what `--set`, options of the engine and `further` replace."""
    overrides = {}
    for assignment in options.set:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--set {assignment!r}: write KEY=VALUE")
        overrides[key] = _yaml_value(f"--set {assignment!r}", value)
    return load_config(options.config, {**overrides, **_engine_overrides(options), **(further or {})})


def _search_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The search, as far as options describe it."""
    given = {"algorithm": options.algorithm, "mean_runs": options.mean_runs}
    if options.runs is not None:
        given["runs"] = _yaml_value("--runs", options.runs)
    if options.values:
        given["values"] = {}
    for assignment in options.values:
        name, separator, numbers = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--values {assignment!r}: write NAME=NUMBER,NUMBER,...")
        given["values"][name] = _yaml_value("--values", f"[{numbers}]")
    return {f"tuning.search.{key}": value for key, value in given.items() if value is not None}


def _yaml_value(option: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{option}: {text!r} is not a YAML value") from None


def _engine_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The experiment's values that options of their own replace."""
    keys = ("engine", "device", "client_parallelism", "clients_per_call")
    given = {key: getattr(options, key, None) for key in keys}
    return {f"training.{key}": value for key, value in given.items() if value is not None}


def _show(options: argparse.Namespace, content: Any, text: str) -> None:
    """Prints figures for programs or for people; progress goes to standard error either way."""
    print(json.dumps(content) if options.json else text)
    sys.stdout.flush()
