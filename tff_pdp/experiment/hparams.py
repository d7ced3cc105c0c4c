"""The `algorithms` part of a configuration: from names and numbers to algorithms and hyper-parameters of every silo.

And its part `tuning.search`: which hyper-parameters can be searched, of which methods, on what.
"""

import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig, SearchSettings, Values
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.kinds import settings_of
from tff_pdp.models.base import Model
from tff_pdp.privacy.plans.search import Search, parse_runs
from tff_pdp.processes.client_work import initial_weights, round_without_gradients
from tff_pdp.processes.compose import hparam_dtype
from tff_pdp.settings import did_you_mean, read_settings

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
    name: str, given: Values, *, num_clients: int, rounds: int, head: Sequence[str] = ()
) -> tuple[Algorithm, dict[str, Any]]:
    """Builds an algorithm from its settings.

    Args:
      name: its name in the experiment.
      given: by name, `kind`, where that is not the name; what its builder takes (fixed in its computations); and its
        hyper-parameters (a number each; those of steps may be "epoch" or "5 epochs", `prox_weight` may be "auto").
      num_clients: of the experiment.
      rounds: of the experiment.
      head: names of the weights of the model's last layer.

    Returns:
      The algorithm, under the experiment's name for it, and all of its hyper-parameters, defaults filled in.

    Raises:
      ConfigError: the kind or a key is unknown, or a value has the wrong type or range.
    """
    key = f"algorithms.{name}"
    kind = given.get("kind", name)
    if not isinstance(kind, str):
        raise ConfigError(f"{key}.kind must be text, not {kind!r}")
    try:
        builder = ALGORITHMS.find(kind)
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix(f'{ALGORITHMS.key}: ')}") from None
    experiment = {"num_clients": num_clients, "rounds": rounds, "head": tuple(head)}
    settings = settings_of(builder, FROM_EXPERIMENT)
    own = [field.name for field in msgspec.structs.fields(settings)]
    arguments = {one: value for one, value in experiment.items() if one in inspect.signature(builder).parameters}
    chosen = read_settings(settings, {one: value for one, value in given.items() if one in own}, "the experiment", key)
    algorithm = builder(**arguments, **msgspec.structs.asdict(chosen))
    if algorithm.name != name:
        algorithm = dataclasses.replace(algorithm, name=name)
    known = [one for one in algorithm.hparams if one != "client_index"]
    hparams = {one: value for one, value in given.items() if one not in ("kind", *own)}
    for one, value in hparams.items():
        if one not in known:
            raise ConfigError(f"unknown key {key}.{one}; {did_you_mean(one, [*known, *own])}")
        if value == AUTO and kind not in _CAN_BE_AUTO:
            raise ConfigError(f"{key}.{one} can be {AUTO!r} only for: {', '.join(_CAN_BE_AUTO)}")
        if value == AUTO and given.get("prox_inside_clip"):
            raise ConfigError(
                f"{key}.{one} cannot be {AUTO!r} with prox_inside_clip: what the clip leaves of the pull is not known"
            )
        check_hparam(f"{key}.{one}", one, value, algorithm.hparams[one])
    return algorithm, {**algorithm.hparams, **hparams}


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


def _candidates(search: SearchSettings, algorithm: Algorithm) -> tuple[dict[str, float], ...]:
    """Every combination of the values."""
    known = [name for name in algorithm.hparams if name not in _NOT_SEARCHED]
    grid = {}
    for name, values in search.values.items():
        key = f"tuning.search.values.{name}"
        if name not in known:
            raise ConfigError(f"{key!r} cannot be searched; {algorithm.name} can be searched for: {', '.join(known)}")
        grid[name] = values
        for value in values:
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
    if config.privacy.num_examples.epsilon is not None:
        missing = [] if config.data.validation_fraction > 0 else missing
    if missing:
        raise ConfigError(
            f"tuning.search scores runs on validation examples, and {len(missing)} of {len(clients.client_ids)} silos "
            f"have none, for example {missing[0]!r}: raise data.validation_fraction or data.min_examples_per_client, "
            "and prepare the data again"
        )
