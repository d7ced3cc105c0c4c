"""Reads the sections `algorithms` and `tuning.search`: algorithms, hyper-parameters, candidates of a search."""

import dataclasses
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.hyper_parameters import AUTO, HParam, read_epochs
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig, SearchSettings, Values
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.kinds import settings_of
from tff_pdp.models.base import Model
from tff_pdp.privacy.plans.search import Search, parse_runs
from tff_pdp.processes.client_work import what_clients_own
from tff_pdp.settings import did_you_mean, read_settings

# Arguments of builders that come from the experiment, not from the method's own settings.
FROM_EXPERIMENT = ("num_clients", "num_weights", "rounds", "head")


def build_algorithm(
    name: str,
    given: Values,
    *,
    num_clients: int,
    rounds: int,
    head: Sequence[str] = (),
    num_weights: int = 0,
    further: Mapping[str, HParam] | None = None,
) -> tuple[Algorithm, dict[str, Any]]:
    """Builds an algorithm from its settings.

    Args:
      name: name of the algorithm in the experiment.
      given: settings by name: `kind`, if it differs from `name`; arguments of the builder, which become constants of
        the computations; and hyper-parameters, which are numbers (a number of steps may also be "epoch" or "5 epochs",
        and some may be "auto").
      num_clients: number of clients of the experiment.
      rounds: number of rounds of the experiment.
      head: names of the weights of the model's last layer.
      num_weights: number of the model's weights, which bounds some settings; 0 leaves these bounds unchecked.
      further: hyper-parameters that the experiment allows besides the algorithm's own; none by default.

    Returns:
      The algorithm, renamed to `name`, and all of its hyper-parameters, with defaults filled in.

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
    experiment = {"num_clients": num_clients, "num_weights": num_weights, "rounds": rounds, "head": tuple(head)}
    settings = settings_of(builder, FROM_EXPERIMENT)
    own = [field.name for field in msgspec.structs.fields(settings)]
    arguments = {one: value for one, value in experiment.items() if one in inspect.signature(builder).parameters}
    chosen = read_settings(settings, {one: value for one, value in given.items() if one in own}, "the experiment", key)
    try:
        algorithm = builder(**arguments, **msgspec.structs.asdict(chosen))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    if algorithm.name != name:
        algorithm = dataclasses.replace(algorithm, name=name)
    hparams = {one: value for one, value in given.items() if one not in ("kind", *own)}
    more = further or {}
    defaults = {**algorithm.defaults, **{one: declared.default for one, declared in more.items()}}
    for one, value in hparams.items():
        declared = algorithm.hparams.get(one) or more.get(one)
        if declared is None:
            raise ConfigError(f"unknown key {key}.{one}; {did_you_mean(one, [*defaults, *own])}")
        if declared.is_set_by_runtime:
            raise ConfigError(f"{key}.{one} cannot be set, because a run computes the value: remove the key")
        declared.check(f"{key}.{one}", value)
    return algorithm, {**defaults, **hparams}


def hparam_columns(
    algorithm: Algorithm, hparams: Mapping[str, Any], num_examples: Mapping[str, int], batch_size: int
) -> dict[str, np.ndarray]:
    """Returns each hyper-parameter that is not `auto` as an array `[clients]`, in the order of `num_examples`."""
    columns = {}
    for name in algorithm.defaults:
        if hparams[name] == AUTO:
            continue
        declared = algorithm.hparams[name]
        epochs = read_epochs(hparams[name])
        if epochs is not None:
            sizes = np.array(list(num_examples.values()))
            steps = epochs * np.maximum(1, sizes // batch_size)
            declared.check(f"algorithms.{algorithm.name}.{name}", int(steps.max()))
            columns[name] = steps.astype(np.int32)
        else:
            columns[name] = np.full(len(num_examples), hparams[name], declared.dtype)
    return columns


def build_search(
    config: ExperimentConfig, algorithm: Algorithm, settings: Mapping[str, Any], model: Model, clients: ClientDataset
) -> Search | None:
    """Returns the search for a method's hyper-parameters; None if the experiment has none.

    `settings` has the method's hyper-parameters for the pivot run, the federated run after which each silo searches
    alone.

    Raises:
      ConfigError: a value is out of range, a hyper-parameter or the method cannot be searched, or a silo has no
        validation examples to score runs on.
    """
    search = config.tuning.search_for(algorithm.name)
    if search is None:
        return None
    candidates = _candidates(search, algorithm)
    if automatic := [name for name, value in settings.items() if value == AUTO]:
        raise ConfigError(
            f"algorithms.{algorithm.name}.{automatic[0]} is {AUTO!r}, that is, set during training: a method with such "
            "a hyper-parameter cannot be searched. Give a number instead"
        )
    owned = what_clients_own(algorithm, model, config.training.rounds).weights
    if algorithm.export.serves_candidates or not owned:
        raise ConfigError(
            f"tuning.search.algorithm: the personal model of {algorithm.name}, with these settings, is a shared model. "
            "A silo cannot search alone for a model that all silos train together, and repeating the whole training "
            "would release every repetition: search a method in which every silo keeps a model of its own"
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
    known = [name for name in algorithm.defaults if algorithm.hparams[name].is_searched]
    grid = {}
    for name, values in search.values.items():
        key = f"tuning.search.values.{name}"
        if name not in known:
            raise ConfigError(f"{key} cannot be searched; {algorithm.name} can be searched for: {', '.join(known)}")
        grid[name] = values
        for value in values:
            algorithm.hparams[name].check(key, value)
        if len(set(values)) < len(values):
            raise ConfigError(f"{key} lists a value twice: {values!r}")
    combinations = itertools.product(*grid.values())
    return tuple({name: float(value) for name, value in zip(grid, one, strict=True)} for one in combinations)


def _check_validation_examples(config: ExperimentConfig, clients: ClientDataset) -> None:
    missing = [client_id for client_id in clients.client_ids if not clients.num_examples(client_id, "validation")]
    # If silos' sizes are secret, so is a lack of validation examples; without any, a silo's choice is noise alone.
    if config.privacy.num_examples.epsilon is not None:
        missing = [] if config.data.validation_fraction > 0 else missing
    if missing:
        raise ConfigError(
            f"tuning.search scores runs on validation examples, and {len(missing)} of {len(clients.client_ids)} silos "
            f"have none, for example {missing[0]!r}: raise data.validation_fraction or data.min_examples_per_client, "
            "and prepare the data again"
        )
