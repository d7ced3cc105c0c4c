"""Runs the demo: prepares digits, trains three methods, reports, exports, and queries a server by REST and by gRPC."""

import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from beam_pipelines.sources.leaf import list_sources
from beam_pipelines.sources.partition import write_digits_leaf
from serving.client.grpc_client import GrpcClient
from serving.client.rest_client import RestClient
from serving.production.exports import docker_command, write_models_config
from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.build import experiment_engine
from tff_pdp.experiment.config import ExperimentConfig, load_experiment
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.personal_models.model_card import exported_ids
from tff_pdp.personal_models.trained_clients import trained_clients
from tff_pdp.settings import CONFIGS
from tff_pdp.training.evaluate import evaluate_experiment, load_trained, summary_table, write_summary
from tff_pdp.training.train import train

MARKER = ".tff_pdp_demo"
NUM_SILOS, LABEL_SKEW, PARTITION_SEED = 10, 0.5, 0
# Served and in-process answers may differ by rounding, because additions have another order, not by more.
TOLERANCE = 1e-5
NUM_EXAMPLES = 4


def run_demo(output: Path, data: str | None, overrides: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Runs the whole demo, and returns the report's summary and the text to print.

    Args:
      output: folder for all results; the results of an earlier demo are replaced.
      data: folder of LEAF FEMNIST JSON; None for scikit-learn's digits.
      overrides: values, by dotted key, that replace values of the demo's configuration.

    Raises:
      ConfigError: `output` is a file, contains files that no demo wrote, or overlaps with `data`.
    """
    started = time.monotonic()
    if data is not None:
        _check_data(output, Path(data))
    _fresh_folder(output)
    config = _config(output, data, overrides or {})
    _announce(1, "prepare: raw LEAF JSON to a client dataset (Apache Beam)")
    prepare_clients(config)
    _announce(2, f"train: {', '.join(config.algorithms)}, each silo under its own budget")
    for name in config.algorithms:
        train(config, name)
    _announce(3, "evaluate: personal models on each silo's test examples")
    summary = evaluate_experiment(config)
    _announce(4, "export: all personal models as one SavedModel")
    version = export_experiment(config).version
    write_models_config(version.parent, config.export.model_name)
    _announce(5, "serve: one REST and one gRPC prediction, compared with the in-process model")
    difference = _largest_difference(config)
    summary["served_difference"] = difference
    summary["served_equals_in_process"] = difference <= TOLERANCE
    summary["seconds"] = round(time.monotonic() - started, 1)
    write_summary(output, summary)
    return summary, _closing_text(config, output, version, summary)


def _config(output: Path, data: str | None, overrides: Mapping[str, Any]) -> ExperimentConfig:
    name = "demo" if data is None else "demo_femnist"
    if data is None:
        data = str(output / "leaf")
        write_digits_leaf(output / "leaf", num_clients=NUM_SILOS, concentration=LABEL_SKEW, seed=PARTITION_SEED)
    return load_experiment(CONFIGS / f"{name}.yaml", {**overrides, "output": str(output), "data.input": data})


def _check_data(output: Path, data: Path) -> None:
    """Checks the user's folder before anything of an earlier demo is replaced."""
    list_sources(data)
    inner, outer = data.resolve(), output.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise ConfigError(f"the data {data} and the output {output} overlap: name another folder with --output")


def _fresh_folder(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is not a folder: name a folder with --output")
    if output.exists() and any(output.iterdir()) and not (output / MARKER).exists():
        raise ConfigError(f"{output} contains files that no demo wrote: name another folder with --output")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (output / MARKER).touch()


def _largest_difference(config: ExperimentConfig) -> float:
    """Serves the export, and returns the largest difference of its answers from the in-process models' answers."""
    method, state = load_trained(config, config.export.algorithm)
    with experiment_engine(config):
        trained = trained_clients(method, state)
        personal = trained.weights_by_id()
    exported_id = exported_ids(config)
    clients = method.clients
    base_path, name = config.export_folder, config.export.model_name
    differences = []
    with EmbeddedServer([ServedModel(name, base_path)]) as server:
        for client in (RestClient(f"127.0.0.1:{server.rest_port}"), GrpcClient(f"127.0.0.1:{server.grpc_port}")):
            for client_id in clients.client_ids:
                x = clients.load(client_id, "test").x[:NUM_EXAMPLES]
                if not len(x):
                    continue
                model = trained.served_model
                expected = model.answers(model.predict(personal[client_id], tf.constant(x))).numpy()
                prediction = client.predict(name, [exported_id(client_id)] * len(x), x)
                if not np.all(prediction.personalized):
                    return float("inf")
                differences.append(float(np.max(np.abs(prediction.answers - expected))))
    if not differences:
        raise DataError("no silo has test examples to compare served and in-process predictions on")
    return max(differences)


def _announce(number: int, text: str) -> None:
    print(f"[{number}/5] {text}", file=sys.stderr, flush=True)


def _closing_text(config: ExperimentConfig, output: Path, version: Path, summary: dict[str, Any]) -> str:
    verdict = "equal" if summary["served_equals_in_process"] else "NOT equal"
    return "\n".join(
        [
            "",
            summary_table(summary),
            f"served and in-process predictions are {verdict} (largest difference {summary['served_difference']:.1e})",
            f"took {summary['seconds']} s",
            "",
            f"report:      {output / 'report.html'}",
            f"summary:     {output / 'summary.json'}",
            f"saved model: {version}",
            f"serve it:    tff-pdp serve --model-base-path {version.parent}",
            f"production:  {docker_command(version.parent, config.export.model_name)}",
        ]
    )
