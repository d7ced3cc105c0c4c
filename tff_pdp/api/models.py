"""Computes the weights and the predictions of clients' personal models, by the same code as an export."""

import contextlib
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import tensorflow as tf

from beam_pipelines.tables.columns import Column
from tff_pdp.data.manifest import Manifest
from tff_pdp.errors import DataError
from tff_pdp.experiment.build import experiment_engine, model_seed
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.models.base import Model
from tff_pdp.personal_models.trained_clients import TrainedClients, as_arrays, nbytes, trained_clients
from tff_pdp.settings import read_settings
from tff_pdp.training.client_store.states import close_states
from tff_pdp.training.evaluate import load_trained
from tff_pdp.training.record.charges import run_id_of

# Models of all clients up to this size, in bytes, are computed together and kept.
_KEPT_BYTES = 2**26
# Number of examples that are predicted together.
_BATCH = 1024
# Number of known ids that an error names.
_NEAREST = 3

ModelWeights = dict[str, np.ndarray]


class PersonalModels:
    """Computes personal models of one trained method when they are first asked for, and keeps them.

    Attributes:
      run: id of the run that the models are from; None for a run of an early version.
    """

    def __init__(self, config: ExperimentConfig, algorithm: str):
        """Computes nothing yet; `algorithm` is the name of a method that has been trained to its last round."""
        self._config, self._algorithm = config, algorithm
        self._kept: dict[str | None, ModelWeights] = {}
        self._model: Model | None = None
        self._manifest: Manifest | None = None
        self.run = run_id_of(config.algorithm_folder(algorithm))

    def weights(self, client_id: str | None) -> ModelWeights:
        """Returns the weights of one client's model by name; for None, those of the model for unknown clients.

        If features are scaled, `input/shift` and `input/scale` are among the weights.

        Raises:
          DataError: no client has this id.
          ConfigError: the method has not been trained to its last round.
        """
        if client_id not in self._kept:
            self._compute(client_id)
        return {name: array.copy() for name, array in self._kept[client_id].items()}

    def predict(self, x: Any, client_id: str | None, *, probabilities: bool = False) -> pd.DataFrame:
        """Predicts labels with one client's model; for None, with the model for unknown clients.

        Args:
          x: examples `[n, *input_shape]`, of numbers: an array, or a data frame. If the client dataset was made of
            tables, a data frame has the columns of features that the tables have, categories and texts included.
          client_id: id of the client.
          probabilities: whether to return the probability of each class, in a column for each class, instead.

        Returns:
          One row for each example, with the index of `x` if `x` is a data frame. For a classifier, the columns are
          `predicted`, the name or the number of the most probable class, and `probability` of this class. For a
          regression, the only column is `predicted`.

        Raises:
          DataError: no client has this id, or `x` has another shape.
          ConfigError: the method has not been trained to its last round.
        """
        weights = self.weights(client_id)
        model, manifest = self._model, self._manifest
        assert model is not None and manifest is not None
        index = x.index if isinstance(x, pd.DataFrame) else None
        columns = manifest.parameters.get("columns") if isinstance(x, pd.DataFrame) else None
        examples = _examples(x if columns is None else _encoded(x, columns, model.input_shape), model.input_shape)
        parts = [
            model.answers(model.predict(weights, tf.constant(examples[first : first + _BATCH]))).numpy()
            for first in range(0, len(examples), _BATCH)
        ]
        empty = np.zeros((0, model.num_classes) if model.num_classes else 0, np.float32)
        answers = np.concatenate(parts or [empty])
        if not model.num_classes:
            return pd.DataFrame({"predicted": answers}, index=index)
        names = np.array(manifest.class_names or range(model.num_classes))
        if probabilities:
            return pd.DataFrame(answers, columns=names, index=index)
        return pd.DataFrame({"predicted": names[answers.argmax(axis=1)], "probability": answers.max(axis=1)}, index)

    def _compute(self, client_id: str | None) -> None:
        """Computes and keeps the weights of one client, or of all clients if their models are small."""
        config = self._config
        method, state = load_trained(config, self._algorithm)
        with contextlib.ExitStack() as stack:
            stack.callback(close_states, state.client_states)
            if client_id is not None:
                check_client(client_id, method.clients.client_ids)
            stack.enter_context(experiment_engine(config))
            trained = trained_clients(method, state, model_seed(config))
            self._model = trained.served_model
            self._manifest = method.clients.manifest
            if client_id is None:
                self._kept[None] = trained.served_global_weights()
            elif len(trained.client_ids) * nbytes(trained.served_model.init(0)) <= _KEPT_BYTES:
                self._kept.update(trained.weights_by_id())
            else:
                # One model at a time: together they may not fit into memory.
                self._kept = {client_id: _weights_of(trained, client_id)}


def _weights_of(trained: TrainedClients, client_id: str) -> ModelWeights:
    number = list(trained.client_ids).index(client_id)
    (weights,) = trained.personalise(trained.ready_states(np.array([number])))
    return {**trained.scaling(number), **as_arrays(weights)}


def _examples(x: Any, input_shape: tuple[int, ...]) -> np.ndarray:
    """Returns examples as float32 `[n, *input_shape]`."""
    try:
        examples = np.asarray(x, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"x must hold numbers: {error}") from None
    if examples.shape[1:] != input_shape or not examples.ndim:
        wanted = ", ".join(map(str, ("n", *input_shape)))
        raise DataError(f"x has shape {examples.shape}, but the model takes examples of shape ({wanted})")
    return examples


def _encoded(frame: pd.DataFrame, columns: Mapping[str, Any], input_shape: tuple[int, ...]) -> np.ndarray:
    """Returns the rows of a data frame as examples, by the columns that the client dataset was made of.

    Raises:
      DataError: a column is missing, or a value cannot be used.
    """
    parts = []
    for name, content in columns.items():
        if name not in frame.columns:
            raise DataError(f"x has no column {name!r}; the model takes the columns {', '.join(columns)}")
        column: Column = read_settings(Column, content, "manifest.json", f"columns.{name}")
        numbers, faults = column.numbers(pyarrow.array(frame[name], from_pandas=True))
        if faults:
            row, value = frame.index[faults[0].row], faults[0].found
            raise DataError(f"x, row {row!r}, column {name!r}: {value!r} must be {column.words}")
        parts.append(numbers)
    return np.concatenate(parts, axis=1).reshape(len(frame), *input_shape)


def check_client(client_id: str, client_ids: Sequence[str]) -> None:
    """Checks that a client is known.

    Raises:
      DataError: no client has this id; the message has the nearest ids.

    >>> check_client("silo_3", ["silo_01", "silo_02", "silo_03"])
    Traceback (most recent call last):
    tff_pdp.errors.DataError: no client 'silo_3' among 3 clients; the nearest ids are silo_03, silo_02, silo_01
    """
    if client_id in client_ids:
        return
    near = difflib.get_close_matches(str(client_id), client_ids, _NEAREST)
    known = f"the nearest ids are {', '.join(near)}" if near else f"ids are {', '.join(client_ids[:_NEAREST])}, ..."
    raise DataError(f"no client {client_id!r} among {len(client_ids)} clients; {known}")
