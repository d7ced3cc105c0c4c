"""Defines the Python API: an experiment as an object, from raw data to personal models.

An import of this module, and the making of an experiment, import no TensorFlow: a wrong setting is found at once. Each
method imports the code that does the work.
"""

import contextlib
import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SUCCESS_FILE
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.config import ExperimentConfig, experiment_of, load_experiment

if TYPE_CHECKING:
    # They take seconds to import.
    import numpy as np
    import pandas as pd

    from tff_pdp.api.models import PersonalModels
    from tff_pdp.api.sweep import Sweep
    from tff_pdp.personal_models.export import Exported

# Options of commands that are arguments of methods here.
_OPTION = re.compile(r"--(overwrite|resume)\b")
# A data frame of raw data, in the experiment's folder.
FRAME_FILE = "frame.parquet"


class Sections(TypedDict, total=False):
    """The sections of an experiment, as in YAML; `tff_pdp.experiment.config.ExperimentConfig` explains each section."""

    title: str
    output: str | os.PathLike[str]
    data: "Mapping[str, Any] | pd.DataFrame"
    model: Mapping[str, Any]
    privacy: Mapping[str, Any]
    training: Mapping[str, Any]
    algorithms: Mapping[str, Mapping[str, Any]]
    export: Mapping[str, Any]
    tuning: Mapping[str, Any]


class Experiment:
    """Runs one experiment, from raw data to personal models, and returns results as pandas frames.

    All files are in the experiment's folder `output`, as with the command `tff-pdp`, and either can go on where the
    other stopped. An object holds no results that the folder lacks: after a restart, the same experiment finds its
    client dataset and its trained methods.

    Every number here is exact and computed from clients' data, unless it says otherwise; the guarantee of a training
    covers the releases that docs/privacy.md lists, and no frame.

    Attributes:
      config: the checked settings.

    >>> import tff_pdp as tp
    >>> experiment = tp.Experiment(
    ...     title="Four silos of digits",
    ...     output=folder,
    ...     data={"kind": "silo_files", "input": digits, "input_shape": [64], "num_classes": 10},
    ...     model={"kind": "linear"},
    ...     privacy={
    ...         "kind": "silo_example",
    ...         "clip_norm": 1.0,
    ...         "batch_size": 32,
    ...         "budgets": {"kind": "one_for_all", "epsilon": 3.0, "delta": 1e-4},
    ...     },
    ...     training={"rounds": 4},
    ...     algorithms={"local_only": {"learning_rate": 0.3}, "mr_mtl": {"learning_rate": 0.3, "prox_weight": 0.3}},
    ...     export={"algorithm": "mr_mtl", "model_name": "digits"},
    ... )
    >>> experiment
    Experiment('Four silos of digits', output=..., algorithms=['local_only', 'mr_mtl'])
    """

    def __init__(self, **sections: Unpack[Sections]):
        """Makes an experiment from its sections, which are checked exactly as those of a YAML file.

        Values may be NumPy numbers and arrays, and paths. `data` may be a pandas data frame with a column `client`, a
        column `label`, and a column for each feature. For other names, and for further settings of the kind `table`,
        `data` is a mapping whose `input` is the data frame. `prepare` writes the frame to `frame.parquet` in `output`.

        Raises:
          ConfigError: a key is unknown or missing, or a value has a wrong type or range.
        """
        content, frame = _without_frame(sections)
        self._set(experiment_of(_plain(content), "Experiment"), frame)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> "Experiment":
        """Reads an experiment from a YAML file.

        Args:
          path: the file or, if no file has this path, the name of an experiment that comes with the package, such as
            `demo` or `reproduce/school`.
          overrides: values that replace the file's, by dotted key, such as `{"training.rounds": 50}`; None removes the
            key.

        Raises:
          ConfigError: as in `Experiment`; or the file is missing or not YAML.

        >>> import tff_pdp as tp
        >>> tp.Experiment.from_yaml("demo", {"output": "runs/mine", "training.rounds": 50}).config.training.rounds
        50
        """
        made = cls.__new__(cls)
        made._set(load_experiment(os.fspath(path), {key: _plain(value) for key, value in (overrides or {}).items()}))
        return made

    def _set(self, config: ExperimentConfig, frame: "pd.DataFrame | None" = None) -> None:
        self.config, self._frame = config, frame
        self._models: dict[str, PersonalModels] = {}
        self._summary: dict[str, Any] | None = None

    def __repr__(self) -> str:
        config = self.config
        return f"Experiment({config.title!r}, output={config.output!r}, algorithms={[*config.algorithms]})"

    def prepare(self, *, overwrite: bool = False) -> "pd.DataFrame":
        """Prepares the client dataset from the raw data; does nothing if the dataset is there already.

        Args:
          overwrite: whether to replace a client dataset that was prepared with other settings.

        Returns:
          One row for each client, with the index `client` and the columns `train`, `validation` and `test`: numbers of
          examples.

        Raises:
          ConfigError: a setting does not suit the input.
          DataError: the input is missing or has too many unusable records, or the folder has another dataset.

        >>> experiment.prepare().sum().to_dict()
        {'train': 1085, 'validation': 330, 'test': 382}
        """
        from tff_pdp.api.frames import clients_frame
        from tff_pdp.experiment.prepare import prepare_clients

        if self._frame is not None:
            from beam_pipelines.tables.files import write_table

            # An equal frame makes an equal file, so that the job finds its dataset.
            write_table(self._frame, Path(self.config.data.input))
        with _options_of_python():
            prepare_clients(self.config, overwrite=overwrite)
        self._forget()
        return clients_frame(ClientDataset.open(self.config.clients_folder))

    @property
    def client_ids(self) -> tuple[str, ...]:
        """Ids of all clients, sorted; `prepare` must have been called.

        >>> experiment.client_ids
        ('silo_0', 'silo_1', 'silo_2', 'silo_3')
        """
        self._check_prepared()
        return ClientDataset.open(self.config.clients_folder).client_ids

    def train(
        self,
        algorithm: str | Sequence[str] | None = None,
        *,
        resume: bool = True,
        overwrite: bool = False,
        progress: bool = True,
    ) -> "pd.DataFrame":
        """Trains methods, each under the clients' privacy budgets; a method with a private search is tuned instead.

        A method that has been trained to its last round is not trained again, and costs nothing further.

        Args:
          algorithm: name of a method, or names of several; by default, all methods of the experiment.
          resume: whether to go on from the newest checkpoint, if there is one; otherwise an existing run is an error.
          overwrite: whether to start again if a run exists; the old run's spending stays on record.
          progress: whether to show a progress bar.

        Returns:
          The validation metrics during training, which are not private: one row for each validation, with the index
          levels `algorithm` and `round`. The column `mean` is the mean of the metric over clients.

        Raises:
          ConfigError: the existing run has other settings, or a method is not in the experiment.
          BudgetError: a round would overspend a budget; the round is not run.
          DataError, EngineError: a file is damaged, or the engine fails.

        >>> history = experiment.train(progress=False)
        >>> history.index.to_list()
        [('local_only', 4), ('mr_mtl', 4)]
        """
        self._check_prepared()
        names = self._names(algorithm)
        from tff_pdp.api.frames import history_frame
        from tff_pdp.training.search.tune import tune
        from tff_pdp.training.train import train

        self._forget()
        for name in names:
            run = tune if self.config.tuning.search_for(name) else train
            with _options_of_python():
                # A new run has nothing to go on from.
                run(self.config, name, resume=resume and not overwrite, overwrite=overwrite, progress=progress)
        return history_frame(self.config, names)

    def evaluate(self, by: Literal["algorithm", "client"] = "algorithm") -> "pd.DataFrame":
        """Tests the personal models of all trained methods, and writes `report.html` and `summary.json`.

        The results are exact, hence not private. A choice among methods or settings by test results biases the
        results: choose by the validation metrics that `train` returns.

        Args:
          by: rows of the result.

        Returns:
          With `by="algorithm"`, one row for each method: `mean` of the test metric over clients, `mean_over_examples`,
          `worst_decile`, `spread`, `shared_mean` and others. With `by="client"`, one row for each method and client:
          `num_test`, `personal` and `shared`, the metrics of the client's own model and of the shared model.

        Raises:
          ConfigError: no method has been trained to its last round.
          DataError: `by` is `client`, and there are more than 5000 users.

        >>> results = experiment.evaluate()
        >>> bool(results.loc["mr_mtl", "mean"] > 0.15)
        True
        >>> experiment.evaluate(by="client").loc["mr_mtl"].index.to_list()
        ['silo_0', 'silo_1', 'silo_2', 'silo_3']
        """
        from tff_pdp.api.frames import client_results_frame, methods_frame

        summary = self._evaluated()
        return client_results_frame(summary) if by == "client" else methods_frame(summary)

    def report(self) -> Path:
        """Returns the path of `report.html`, with results, figures and privacy statement; writes the file if needed.

        Raises ConfigError if no method has been trained to its last round.

        >>> experiment.report().name
        'report.html'
        """
        self._evaluated()
        return Path(self.config.output) / "report.html"

    def personal_weights(self, client_id: str | None = None, algorithm: str | None = None) -> "dict[str, np.ndarray]":
        """Returns the weights of one client's personal model, as float32 arrays by name.

        Args:
          client_id: id of the client; None for the model of unknown clients, as an export has it.
          algorithm: name of the method; by default, the method that `export.algorithm` names.

        Raises:
          ConfigError: the method has not been trained to its last round.
          DataError: no client has this id; the message has the nearest ids.

        >>> {name: array.shape for name, array in experiment.personal_weights("silo_1").items()}
        {'dense_0/kernel': (64, 10), 'dense_0/bias': (10,)}
        """
        return self._personal_models(algorithm).weights(client_id)

    def predict(
        self, x: Any, client_id: str | None = None, algorithm: str | None = None, *, probabilities: bool = False
    ) -> "pd.DataFrame":
        """Predicts labels with one client's personal model, in this process.

        Args:
          x: examples `[n, *input_shape]`, of numbers: an array, or a data frame. If the client dataset was made of
            tables, a data frame has the columns of features that the tables have, categories and texts included.
          client_id: id of the client; None for the model of unknown clients, as an export has it.
          algorithm: name of the method; by default, the method that `export.algorithm` names.
          probabilities: whether to return the probability of each class, in a column for each class, instead.

        Returns:
          One row for each example, with the index of `x` if `x` is a data frame. For a classifier, the columns are
          `predicted`, the name or the number of the most probable class, and `probability` of this class. For a
          regression, the only column is `predicted`.

        Raises:
          ConfigError: the method has not been trained to its last round.
          DataError: no client has this id, or `x` has another shape.

        >>> experiment.predict([[0.5] * 64, [0.0] * 64], "silo_1").columns.to_list()
        ['predicted', 'probability']
        """
        return self._personal_models(algorithm).predict(x, client_id, probabilities=probabilities)

    def spent(self) -> "pd.DataFrame":
        """Computes the privacy spent so far by every method, finished or not, and by all runs on record together.

        Budgets are for one run. Methods that are trained on the same records cost more together: the rows of the
        algorithm `all runs on record` have the composed cost of all runs on the same records, in all folders.

        Guarantee: `epsilon_spent` is at least the spending of each run, also of a run that was stopped or killed.
        Assumes: as in `tff_pdp.training.counted.cost_of_all_runs`.

        Returns:
          One row for each method and scope (a silo, or all users), with the index levels `algorithm` and `client` and
          the columns `epsilon_budget`, `epsilon_spent`, `epsilon_left`, `delta` and `why_no_bound`. Where no bound
          holds, `epsilon_spent` is infinite.

        Raises:
          ConfigError: no method has begun training.
          DataError: a run's record, or the registry, is damaged.

        >>> spent = experiment.spent()
        >>> bool((spent.loc["mr_mtl", "epsilon_spent"] <= 3.0).all())
        True
        >>> bool((spent.loc["all runs on record", "epsilon_spent"] > 3.0).all())
        True
        """
        self._check_prepared()
        from tff_pdp.api.spending import spent_frame

        return spent_frame(self.config, list(self.config.algorithms))

    def export(self, *, drop_added: bool = False) -> "Exported":
        """Exports the personal models of the method `export.algorithm` as a SavedModel for TensorFlow Serving.

        Args:
          drop_added: whether the new version may leave out clients that `tff_pdp.personalize` has added.

        Returns:
          The folders of the new versions, by model name, with layout and size; see
          `tff_pdp.personal_models.export.Exported`. `version` is the folder of a single new version.

        Raises:
          ConfigError: the method has not been trained to its last round, or the models must not leave the silos.
          ServingError: the export failed its checks, or added clients would be lost; nothing was published.

        >>> experiment.export().version.parent.name
        'digits'
        """
        self._check_trained([self.config.export.algorithm])
        from tff_pdp.personal_models.export import export_experiment

        return export_experiment(self.config, drop_added=drop_added)

    def sweep(
        self,
        values: Mapping[str, Sequence[Any]],
        algorithm: str | Sequence[str] | None = None,
        *,
        test: bool = True,
        progress: bool = True,
    ) -> "Sweep":
        """Trains every combination of some settings' values on the one client dataset, and states the cost of all runs.

        Each run spends the clients' whole budgets, and the composed cost of the sweep is larger: one line says so. To
        choose hyper-parameters within one budget, use `tuning.search`, or `prox_weight: auto` of MR-MTL.

        Guarantee: `composed.epsilon` bounds the joint cost of all runs of the sweep, and `composed.all_epsilon` that of
          all runs on record, for each record of the scope.
        Assumes: as in `tff_pdp.training.counted.cost_of_all_runs`.

        Args:
          values: values to try, by dotted key of the setting, such as `{"algorithms.mr_mtl.prox_weight": [0.1, 1]}`.
            Settings of the data cannot be swept.
          algorithm: name of a method, or names of several; by default, the methods whose settings are swept or, if
            other settings are swept, all methods.
          test: whether to test each point, and to write its report.
          progress: whether to show progress.

        Returns:
          A `tff_pdp.api.sweep.Sweep`: the frame `points` has a row for each point and method, with the settings, the
          validation metric by which to choose, and test figures; the frame `composed` has the cost of all runs of the
          sweep by scope; `text` has the cost in one line. A repeated sweep trains only what is missing.

        Raises:
          ConfigError: a setting is unknown or cannot be swept, or a value is out of range; nothing was trained.
          BudgetError: a budget cannot be met, or a round would overspend.
          DataError: the client dataset has not been prepared, or a file is damaged.

        >>> points, composed, text = experiment.sweep(
        ...     {"algorithms.mr_mtl.prox_weight": [0.1, 1.0]}, test=False, progress=False
        ... )
        >>> points["prox_weight"].to_list()
        [0.1, 1.0]
        >>> bool((composed["epsilon"] > 3.0).all())
        True
        """
        self._check_prepared()
        from tff_pdp.api.sweep import run_sweep

        plain = {key: _plain(choices) for key, choices in values.items()}
        names = None if algorithm is None else self._names(algorithm)
        return run_sweep(self.config, plain, names, test=test, progress=progress)

    def _names(self, algorithm: str | Sequence[str] | None) -> list[str]:
        known = self.config.algorithms
        names = list(known) if algorithm is None else [algorithm] if isinstance(algorithm, str) else list(algorithm)
        for name in names:
            if name not in known:
                raise ConfigError(f"{name!r} is not in this experiment, which has: {', '.join(known)}")
        return names

    def _check_prepared(self) -> None:
        if not (self.config.clients_folder / SUCCESS_FILE).exists():
            raise ConfigError(f"{self.config.output} has no client dataset yet: call prepare() first")

    def _check_trained(self, names: Sequence[str]) -> None:
        self._check_prepared()
        for name in names:
            done, rounds = _rounds_done(self.config, name), self.config.training.rounds
            if done < rounds:
                raise ConfigError(f"{name} has {done} of {rounds} rounds: call train() first")

    def _personal_models(self, algorithm: str | None) -> "PersonalModels":
        (name,) = self._names(algorithm or self.config.export.algorithm)
        self._check_trained([name])
        from tff_pdp.api.models import PersonalModels
        from tff_pdp.training.record.charges import run_id_of

        kept = self._models.get(name)
        # Another process may have trained the method again.
        if kept is None or kept.run != run_id_of(self.config.algorithm_folder(name)):
            kept = self._models[name] = PersonalModels(self.config, name)
        return kept

    def _evaluated(self) -> dict[str, Any]:
        """Returns the summary of all trained methods, which is computed once after each training."""
        if self._summary is None:
            rounds = self.config.training.rounds
            names = [name for name in self.config.algorithms if _rounds_done(self.config, name) >= rounds]
            self._check_trained(names or list(self.config.algorithms))
            from tff_pdp.training.evaluate import evaluate_experiment

            self._summary = evaluate_experiment(self.config, names)
        return copy.deepcopy(self._summary)

    def _forget(self) -> None:
        """Drops results that a new preparation or training makes invalid."""
        self._models, self._summary = {}, None


@contextlib.contextmanager
def _options_of_python() -> Iterator[None]:
    """Replaces options of commands, which messages advise, by the arguments of the same names."""
    try:
        yield
    except (ConfigError, DataError) as error:
        told = _OPTION.sub(lambda option: f"{option[1]}=True", str(error))
        raise type(error)(told) from error


def _without_frame(sections: Mapping[str, Any]) -> tuple[dict[str, Any], "pd.DataFrame | None"]:
    """Returns the sections with the path of a file in place of a data frame, and the frame; None without a frame."""
    data = sections.get("data")
    if _is_frame(data):
        data = {"input": data, "client_column": "client", "label_column": "label"}
    frame = data.get("input") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not _is_frame(frame):
        return dict(sections), None
    path = Path(sections.get("output") or ".") / FRAME_FILE
    return {**sections, "data": {"kind": "table", **data, "input": path}}, frame


def _is_frame(value: Any) -> bool:
    # Nobody has a frame who has not imported pandas.
    return "pandas" in sys.modules and isinstance(value, sys.modules["pandas"].DataFrame)


def _rounds_done(config: ExperimentConfig, name: str) -> int:
    """Returns the round of a method's newest checkpoint; 0 without a checkpoint."""
    from tff_pdp.training.record import checkpoint_files
    from tff_pdp.training.record.releases import CHECKPOINTS

    saved = checkpoint_files.newest(config.algorithm_folder(name) / CHECKPOINTS, with_arrays=False)
    return saved.round_number if saved else 0


def _plain(value: Any) -> Any:
    """Returns a value as YAML has it: paths become text, NumPy's numbers and arrays become numbers and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value
