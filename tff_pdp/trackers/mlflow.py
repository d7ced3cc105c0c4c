"""Writes runs to an MLflow tracking store: by default to files in the experiment's folder, without a server."""

import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tff_pdp.trackers.base import RoundReport, RunFacts, require_package

_INSTALL = (
    "pip install --no-deps --require-hashes -r \"$(python -c 'import tff_pdp; print(tff_pdp.__path__[0])')"
    '/requirements-mlflow.txt"'
)
# By this tag a resumed run finds the MLflow run that it continues.
_TAG = "tff_pdp.run_id"
# MLflow refuses longer values of parameters.
_LONGEST_VALUE = 500


class Mlflow:
    """Writes parameters and metrics of a run; `mlflow ui --backend-store-uri OUTPUT/mlflow` shows them.

    Figures of a round that a resumed run repeats are written again, with the same values.
    """

    def __init__(self, tracking_uri: str, experiment: str):
        """Stores the address of the store, and the name of the MLflow experiment; both may be empty for defaults."""
        self._tracking_uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run = ""

    def began(self, run: RunFacts) -> None:
        """Begins an MLflow run with the settings as parameters, or continues the MLflow run of a resumed run."""
        uri = self._tracking_uri or (run.folder.parent / "mlflow").resolve().as_uri()
        self._client = client = _imported("mlflow").MlflowClient(tracking_uri=uri)
        name = self._experiment or run.title
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        earlier = client.search_runs([experiment], f"tags.`{_TAG}` = '{run.run_id}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        self._run = client.create_run(experiment, tags={_TAG: run.run_id}, run_name=run.method).info.run_id
        new_param = _imported("mlflow.entities").Param
        client.log_batch(self._run, params=[new_param(key, value) for key, value in _parameters(run.settings)])

    def round_done(self, report: RoundReport) -> None:
        """Writes the round's scalars."""
        new_metric, now = _imported("mlflow.entities").Metric, int(time.time() * 1000)
        metrics = [new_metric(name, value, now, report.round_number) for name, value in report.scalars().items()]
        self._client.log_batch(self._run, metrics=metrics)

    def ended(self, run: RunFacts) -> None:
        """Ends the MLflow run; the status `KILLED` says that training was stopped before its last round."""
        self._client.set_terminated(self._run, "FINISHED" if run.is_finished else "KILLED")


def build_mlflow(*, tracking_uri: str = "", experiment: str = "") -> Mlflow:
    """Builds a tracker that writes runs to an MLflow tracking store.

    Args:
      tracking_uri: address of the store, such as `http://localhost:5000`; by default, files in the folder `mlflow` of
        the experiment's folder.
      experiment: name of the MLflow experiment; by default the title of the experiment.

    Raises:
      ConfigError: MLflow is not installed.
    """
    require_package("mlflow", "mlflow", _INSTALL)
    return Mlflow(tracking_uri, experiment)


def _imported(module: str) -> Any:
    """Imports a module of a package that need not be installed."""
    return importlib.import_module(module)


def _parameters(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _parameters(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)[:_LONGEST_VALUE]
