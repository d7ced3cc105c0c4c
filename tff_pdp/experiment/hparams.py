"""The `algorithms` part of a configuration: from names and numbers to algorithms and hyper-parameters of every silo."""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.registry import ALGORITHMS
from tff_pdp.processes.compose import hparam_dtype

# As many steps as make some epochs of whole batches.
_EPOCHS = re.compile(r"epoch|([1-9][0-9]*) epochs?")
# Set during training, from released models; for these methods.
AUTO = "auto"
_CAN_BE_AUTO = ("mr_mtl",)
# Taken from the experiment, not from the method's own settings.
FROM_EXPERIMENT = ("num_clients", "rounds", "head")


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
