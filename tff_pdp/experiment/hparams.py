"""The `algorithms` part of a configuration: from names and numbers to algorithms and hyper-parameters of every silo.

And its part `tuning.search`: which hyper-parameters can be searched, of which methods, on what.
"""

import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig, SearchConfig
from tff_pdp.experiment.registry import ALGORITHMS
from tff_pdp.models.base import Model
from tff_pdp.privacy.mechanisms.silo_statistics import parse_num_examples
from tff_pdp.privacy.plans.search import Search, parse_runs
from tff_pdp.processes.client_work import initial_weights, round_without_gradients
from tff_pdp.processes.compose import hparam_dtype

# As many steps as make some epochs of whole batches.
_EPOCHS = re.compile(r"epoch|([1-9][0-9]*) epochs?")
# Set during training, from released models; for these methods.
AUTO = "auto"
_CAN_BE_AUTO = ("mr_mtl",)
# Taken from the experiment, not from the method's own settings.
FROM_EXPERIMENT = ("num_clients", "rounds", "head")
# The number of local steps decides how much noise they need; a client's index is who it is.
_NOT_SEARCHED = ("local_steps", "client_index")


def build_algorithm(
    name: str, given: Mapping[str, Any], *, num_clients: int, rounds: int, head: Sequence[str] = ()
) -> tuple[Algorithm, dict[str, Any]]:
    """Builds an algorithm from its settings.

    Args:
      name: its name in the registry.
      given: by name, what its builder takes (fixed in its computations) and its hyper-parameters (a number each;
        those of steps may be "epoch" or "5 epochs", `prox_weight` may be "auto").
      num_clients: of the experiment.
      rounds: of the experiment.
      head: names of the weights of the model's last layer.

    Returns:
      The algorithm and all of its hyper-parameters, defaults filled in.

    Raises:
      ConfigError: the name or a key is unknown, or a value has the wrong type or range.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithms: {name!r} is not known; known: {', '.join(sorted(ALGORITHMS))}")
    builder = ALGORITHMS[name]
    parameters = inspect.signature(builder).parameters
    experiment = {"num_clients": num_clients, "rounds": rounds, "head": tuple(head)}
    arguments = {key: value for key, value in experiment.items() if key in parameters}
    given = {key: read_number(value) for key, value in given.items()}
    settable = [key for key in parameters if key not in FROM_EXPERIMENT]
    for key in settable:
        if key in given:
            arguments[key] = _argument(f"algorithms.{name}.{key}", given[key], parameters[key].default)
    algorithm = builder(**arguments)
    known = [key for key in algorithm.hparams if key != "client_index"]
    for key, value in given.items():
        if key in settable:
            continue
        if key not in known:
            raise ConfigError(
                f"unknown key 'algorithms.{name}.{key}'; {name} has: {', '.join([*known, *sorted(settable)])}"
            )
        if value == AUTO and name not in _CAN_BE_AUTO:
            raise ConfigError(f"'algorithms.{name}.{key}' can be {AUTO!r} only for: {', '.join(_CAN_BE_AUTO)}")
        if value == AUTO and given.get("prox_inside_clip"):
            raise ConfigError(
                f"'algorithms.{name}.{key}' cannot be {AUTO!r} with prox_inside_clip: what the clip leaves of the pull "
                "is not known"
            )
        check_hparam(f"algorithms.{name}.{key}", key, value, algorithm.hparams[key])
    return algorithm, {**algorithm.hparams, **{key: value for key, value in given.items() if key in known}}


def hparam_columns(
    algorithm: Algorithm, hparams: Mapping[str, Any], num_examples: Mapping[str, int], batch_size: int
) -> dict[str, np.ndarray]:
    """Every hyper-parameter of every client, in the order of `num_examples`; `prox_weight: auto` is left out."""
    columns = {}
    for name, default in algorithm.hparams.items():
        if name == "client_index" or hparams[name] == AUTO:
            continue
        epochs = read_epochs(hparams[name])
        if epochs is not None:
            sizes = np.array(list(num_examples.values()))
            steps = epochs * np.maximum(1, sizes // batch_size)
            check_hparam(f"algorithms.{algorithm.name}.{name}", name, int(steps.max()), default)
            columns[name] = steps.astype(np.int32)
        else:
            columns[name] = np.full(len(num_examples), hparams[name], hparam_dtype(default))
    return columns


def read_epochs(value: Any) -> int | None:
    """How many epochs a number of steps is, if it is given so; an epoch is as many whole batches as there are, or one.

    >>> read_epochs("epoch"), read_epochs("5 epochs"), read_epochs(3)
    (1, 5, None)
    """
    match = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    return int(match[1] or 1) if match else None


def check_hparam(key: str, name: str, value: Any, default: float | int) -> None:
    """Checks one hyper-parameter's value.

    Args:
      key: where it stands, for the message.
      name: of the hyper-parameter.
      value: as given.
      default: of the algorithm; a whole number asks for whole numbers.

    Raises:
      ConfigError: the value has the wrong type or range.
    """
    counts_steps = name.endswith("_steps")
    if (counts_steps and read_epochs(value)) or (name, value) == ("prox_weight", AUTO):
        return
    wanted = int if isinstance(default, int) else (int, float)
    lowest = 1 if counts_steps else 0
    highest = np.iinfo(np.int32).max if wanted is int else math.inf
    if isinstance(value, bool) or not isinstance(value, wanted) or not lowest <= value < highest:
        word = " or such as '5 epochs'" if counts_steps else f" or {AUTO!r}" if name == "prox_weight" else ""
        raise ConfigError(f"{key!r} must be a finite number of at least {lowest}{word}, not {value!r}")


def read_number(value: Any) -> Any:
    """The number that a text is; anything else as it is. YAML 1.1 reads 1e-3 as text.

    >>> read_number("1e-3"), read_number("epoch"), read_number(2)
    (0.001, 'epoch', 2)
    """
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _whole_numbers(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(one) is not int or one < 1 for one in value):
        raise ConfigError(f"{key!r} must be a list of whole numbers of at least 1, not {value!r}")
    return tuple(value)


def _argument(key: str, value: Any, default: Any) -> Any:
    """A builder's argument, of the type of its default."""
    kind = type(default)
    if kind is tuple:
        return _whole_numbers(key, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{key!r} must be a {kind.__name__}, not {value!r}")
    if key.endswith("_fraction") and not 0 <= value <= 1:
        raise ConfigError(f"{key!r} must lie between 0 and 1, not {value!r}")
    if kind is int and value < 1:
        raise ConfigError(f"{key!r} must be at least 1, not {value!r}")
    if kind is float and not 0 <= value < math.inf:
        raise ConfigError(f"{key!r} must be finite and not negative, not {value!r}")
    return value


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
