"""Runs each command: reads the experiment, calls the part that does the work, says where the outputs are."""

import argparse
import contextlib
import dataclasses
import gc
import ipaddress
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig, load_experiment
from tff_pdp.settings import parse_yaml


def prepare(options: argparse.Namespace) -> int:
    """Runs the preprocessing job of the experiment."""
    from tff_pdp.experiment.prepare import prepare_clients

    summary = prepare_clients(_config(options), overwrite=options.overwrite)
    _show(options, summary.as_dict(), summary.table())
    return 0


def config(options: argparse.Namespace) -> int:
    """Shows an experiment with its defaults, in YAML, or describes all keys."""
    if options.schema or options.reference:
        from tff_pdp.experiment.reference import reference, schema

        print(reference() if options.reference else json.dumps(schema(), indent=2, ensure_ascii=False), end="")
        return 0
    import yaml

    from tff_pdp.experiment.build import build_methods

    found = _config(options)
    for algorithm, _ in build_methods(found, num_clients=2)[1].values():
        found.privacy.check(algorithm, found.training.weighting)
    print(yaml.safe_dump(found.to_dict(), sort_keys=False, allow_unicode=True), end="")
    return 0


def train(options: argparse.Namespace) -> int:
    """Trains the chosen methods, one after the other."""
    from tff_pdp.training.train import train as train_method

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
    from tff_pdp.training.search.tune import tune as tune_method
    from tff_pdp.training.search.tune import tune_summary, tune_text

    config = _config(options, _search_overrides(options))
    if config.tuning.search is None:
        raise ConfigError("nothing to search: give tuning.search in the configuration, or --algorithm and --values")
    tuned = tune_method(config, config.tuning.search.algorithm, resume=options.resume, overwrite=options.overwrite)
    summary = tune_summary(config, tuned)
    _show(options, summary, tune_text(summary))
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Tests the personal models and writes the report."""
    from tff_pdp.training.evaluate import evaluate_experiment, summary_table

    config = _config(options)
    summary = evaluate_experiment(config, options.algorithm)
    _show(options, summary, f"{summary_table(summary)}\nreport: {Path(config.output) / 'report.html'}")
    return 0


def export(options: argparse.Namespace) -> int:
    """Exports the experiment's chosen method."""
    from serving.production.exports import docker_command, write_models_config
    from tff_pdp.personal_models.export import export_experiment

    config = _config(options)
    exported = export_experiment(config, drop_added=options.drop_added)
    folder = config.export_folder.parent
    content = {
        "versions": {name: str(version) for name, version in exported.versions.items()},
        "layout": exported.layout,
        "size": dataclasses.asdict(exported.size),
        "bytes_about": dict(exported.sizes),
    }
    plain_ids, key = config.export.client_ids == "plain", config.client_id_key
    lines = [
        f"layout: {exported.layout_text()}",
        f"size: {exported.size.text()}",
        f"requests name clients: {'by their ids' if plain_ids else f'by keyed hashes of their ids, the key is {key}'}",
    ]
    if config.export.model_name in exported.versions:
        version = exported.version
        content |= {
            "version": str(version),
            "models_config": str(write_models_config(version.parent, config.export.model_name)),
        }
        lines = [
            f"exported: {version}",
            *lines,
            f"serve it here: tff-pdp serve --model-base-path {version.parent}",
            f"in production: {docker_command(version.parent, config.export.model_name)}",
        ]
    else:
        own = f"{folder / config.export.model_name}.CLIENT"
        lines = [
            f"exported: {len(exported.versions)} models, in {own}",
            *lines,
            f"serve one here: tff-pdp serve --model-base-path {own}",
            f"in production: serving deploy {folder} --output FOLDER",
        ]
    _show(options, content, "\n".join(lines))
    return 0


def personalize(options: argparse.Namespace) -> int:
    """Adds clients to the export, fitted to their own examples."""
    from tff_pdp.personal_models.new_clients.fit import FitOptions
    from tff_pdp.personal_models.new_clients.personalize import personalize as add_clients
    from tff_pdp.personal_models.new_clients.personalize import personalized_content, personalized_text

    fit = FitOptions(
        steps=options.steps,
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
        clip_norm=options.clip_norm,
        epsilon=options.epsilon,
        delta=options.delta,
        replace=options.replace,
    )
    done = add_clients(_config(options), Path(options.examples), options.client_id, fit)
    _show(options, personalized_content(done), personalized_text(done))
    return 0


def serve(options: argparse.Namespace) -> int:
    """Serves exports until interrupted or terminated."""
    from serving.models_config import ServedModel, read_model_config_file
    from serving.server.embedded import EmbeddedServer
    from serving.server.options import BatchingOptions, read_batching_file

    if options.model_config_file:
        if options.model_name:
            raise ConfigError("--model-name goes with --model-base-path; --model-config-file names its models itself")
        models = read_model_config_file(Path(options.model_config_file))
    else:
        base_path = Path(options.model_base_path)
        models = [ServedModel(options.model_name or base_path.resolve().name, base_path)]
    batching = None if options.no_batching else BatchingOptions()
    if options.batching_parameters_file:
        batching = read_batching_file(Path(options.batching_parameters_file))
    server = EmbeddedServer.of_models(
        models,
        rest_port=options.rest_port,
        grpc_port=options.grpc_port,
        host=options.host,
        poll_seconds=options.poll_seconds,
        batching=batching,
        max_bytes=options.max_bytes,
        max_elements=options.max_elements,
    )
    if not _is_loopback(options.host):
        print(
            f"warning: --host {options.host} is not a loopback address: whoever reaches it can ask every model and "
            "change which are served, without a password",
            file=sys.stderr,
        )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # Whoever reads the banner may end the server in the same moment, before it waits.
        with server, contextlib.suppress(KeyboardInterrupt):
            # What the start has made stays; looking through it took a tenth of the time of small requests.
            gc.collect()
            gc.freeze()
            print(server.banner, flush=True)
            server.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def predict(options: argparse.Namespace) -> int:
    """Sends some test examples to a server and prints what comes back."""
    from serving.client.grpc_client import GrpcClient
    from serving.client.rest_client import RestClient
    from tff_pdp.data.client_dataset import ClientDataset

    config = _config(options)
    client_id = _exported_id(config, options.client_id)
    clients = ClientDataset.open(config.clients_folder)
    examples = clients.load(options.examples_of or options.client_id, "test")
    x, y = examples.x[: options.num_examples], examples.y[: options.num_examples]
    client = GrpcClient(options.address) if options.grpc else RestClient(options.address)
    prediction = client.predict(_served_name(config, client_id), [client_id] * len(x), x)
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
    from tff_pdp.commands.demo import run_demo

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
    from tff_pdp.commands.doctor import examine

    content, text = examine()
    _show(options, content, text)
    return 0 if content["healthy"] else 1


def _exported_id(config: ExperimentConfig, client_id: str) -> str:
    """What requests have in place of a client's id."""
    from serving.client_ids import ClientIdHash

    return client_id if config.export.client_ids == "plain" else ClientIdHash.load(config.client_id_key)(client_id)


def _served_name(config: ExperimentConfig, exported_id: str) -> str:
    """The model that answers for a client: the one of all, unless every client has its own."""
    base_path = config.export_folder
    own = base_path.with_name(f"{base_path.name}.{exported_id}")
    is_divided = config.export.layout == "per_client" or (own.is_dir() and not base_path.is_dir())
    return own.name if is_divided else base_path.name


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
    return load_experiment(options.config, {**overrides, **_engine_overrides(options), **(further or {})})


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
    return parse_yaml(text, option)


def _engine_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The experiment's values that options of their own replace."""
    keys = ("engine", "device", "client_parallelism", "clients_per_call")
    given = {key: getattr(options, key, None) for key in keys}
    return {f"training.{key}": value for key, value in given.items() if value is not None}


def _show(options: argparse.Namespace, content: Any, text: str) -> None:
    """Prints figures for programs or for people; progress goes to standard error either way."""
    print(json.dumps(content) if options.json else text)
    sys.stdout.flush()
