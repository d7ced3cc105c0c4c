"""The `tuning.search` part of a configuration: which hyper-parameters can be searched, of which methods, on what."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig, SearchConfig
from tff_pdp.experiment.hparams import AUTO, check_hparam, read_number
from tff_pdp.models.base import Model
from tff_pdp.privacy.mechanisms.silo_statistics import parse_num_examples
from tff_pdp.privacy.plans.search import Search, parse_runs
from tff_pdp.processes.client_work import initial_weights, round_without_gradients

# The number of local steps decides how much noise they need; a client's index is who it is.
_NOT_SEARCHED = ("local_steps", "client_index")


def build_search(
    config: ExperimentConfig, algorithm: Algorithm, settings: Mapping[str, Any], model: Model, clients: ClientDataset
) -> Search | None:
    """Returns the search for a method's hyper-parameters; None where the experiment has none.

    Args:
      config: the experiment.
      algorithm: the method.
      settings: its hyper-parameters, those of the pivot run.
      model: what it trains.
      clients: the client dataset.

    Raises:
      ConfigError: a value is out of range, a hyper-parameter or the method cannot be searched, or a silo has no
        validation examples to score runs on.
    """
    search = config.tuning.search_for(algorithm.name)
    if search is None:
        return None
    for key in ("score_noise_multiplier", "score_bound"):
        value = getattr(search, key)
        if not 0 < value < math.inf:
            raise ConfigError(f"tuning.search.{key} must be positive and finite, not {value!r}")
    candidates = _candidates(search, algorithm)
    if AUTO in settings.values():
        raise ConfigError(
            f"algorithms.{algorithm.name}.prox_weight is {AUTO!r}: it is then set during training and cannot be "
            "searched, nor can what it is set to go with other values; give it a number"
        )
    if not _keeps_own_model(algorithm, model, config.training.rounds):
        raise ConfigError(
            f"tuning.search.algorithm: the personal model of {algorithm.name}, as it is set here, is a shared one. "
            "A silo cannot search alone for what all silos train together, and repeating the whole training would "
            "release every repetition: search a method in which every silo keeps a model of its own"
        )
    _check_validation_examples(config, clients)
    return Search(
        candidates=candidates,
        runs=parse_runs(search.runs, search.mean_runs, len(candidates)),
        score_noise_multiplier=search.score_noise_multiplier,
        sensitivity=1.0 if model.num_classes else search.score_bound,
        has_pivot=bool(algorithm.released),
    )


def _candidates(search: SearchConfig, algorithm: Algorithm) -> tuple[dict[str, float], ...]:
    """Every combination of the values."""
    known = [name for name in algorithm.hparams if name not in _NOT_SEARCHED]
    if not search.values:
        raise ConfigError(f"tuning.search.values is empty; {algorithm.name} can be searched for: {', '.join(known)}")
    grid = {}
    for name, values in search.values.items():
        key = f"tuning.search.values.{name}"
        if name not in known:
            raise ConfigError(f"{key!r} cannot be searched; {algorithm.name} can be searched for: {', '.join(known)}")
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(f"{key!r} must be a list of numbers, not {values!r}")
        grid[name] = values = [read_number(value) for value in values]
        for value in values:
            if isinstance(value, str):
                raise ConfigError(f"{key!r} must be a list of numbers, not {values!r}")
            check_hparam(key, name, value, algorithm.hparams[name])
        if len(set(values)) < len(values):
            raise ConfigError(f"{key!r} has a value twice: {values!r}")
    combinations = itertools.product(*grid.values())
    return tuple({name: float(value) for name, value in zip(grid, one, strict=True)} for one in combinations)


def _keeps_own_model(algorithm: Algorithm, model: Model, rounds: int) -> bool:
    """Whether a client's model, after so many rounds, is a function of what the client keeps."""
    server = dict(algorithm.init_server(initial_weights(model)))
    if "round" in server:
        server["round"] = tf.constant(rounds - 1)
    message = algorithm.broadcast(server)
    # Some methods note in the client's state whether a model is its own: it is that of the last round which counts.
    state = round_without_gradients(algorithm, message, model).state

    def moved(leaf: Any) -> Any:
        tensor = tf.convert_to_tensor(leaf)
        return tensor + 1 if tensor.dtype.is_floating else tensor

    before = algorithm.personalise(message, state)
    after = algorithm.personalise(message, tf.nest.map_structure(moved, state))
    return any(np.any(np.asarray(before[name]) != np.asarray(after[name])) for name in before)


def _check_validation_examples(config: ExperimentConfig, clients: ClientDataset) -> None:
    missing = [client_id for client_id in clients.client_ids if not clients.num_examples(client_id, "validation")]
    # Where silos' sizes are secret, so is whether one has no validation examples; its choice is then noise alone.
    if parse_num_examples(config.privacy.num_examples) is not None:
        missing = [] if config.data.validation_fraction > 0 else missing
    if missing:
        raise ConfigError(
            f"tuning.search scores runs on validation examples, and {len(missing)} of {len(clients.client_ids)} silos "
            f"have none, for example {missing[0]!r}: raise data.validation_fraction or data.min_examples_per_client, "
            "and prepare the data again"
        )
