"""The `algorithms` part of a configuration: from names and numbers to algorithms and hyper-parameters of every silo."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.errors import ConfigError
from tff_pdp.processes.compose import hparam_dtype
from tff_pdp.registry import ALGORITHMS

# As many local steps as make one epoch of expected batches.
EPOCH = "epoch"
# Set during training, from released models; for these methods.
AUTO = "auto"
_CAN_BE_AUTO = ("mr_mtl",)
# Taken from the experiment, not from the method's own settings.
_FROM_EXPERIMENT = ("num_clients", "rounds")


def build_algorithm(
    name: str, given: Mapping[str, Any], *, num_clients: int, rounds: int
) -> tuple[Algorithm, dict[str, Any]]:
    """Builds an algorithm from its settings.

    Args:
      name: its name in the registry.
      given: by name, what its builder takes (fixed in its computations) and its hyper-parameters (a number each;
        `local_steps` may be "epoch", `prox_weight` may be "auto").
      num_clients: of the experiment.
      rounds: of the experiment.

    Returns:
      The algorithm and all of its hyper-parameters, defaults filled in.

    Raises:
      ConfigError: the name or a key is unknown, or a value has the wrong type or range.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithms: {name!r} is not known; known: {', '.join(sorted(ALGORITHMS))}")
    builder = ALGORITHMS[name]
    parameters = inspect.signature(builder).parameters
    experiment = {"num_clients": num_clients, "rounds": rounds}
    arguments = {key: value for key, value in experiment.items() if key in parameters}
    given = {key: read_number(value) for key, value in given.items()}
    settable = [key for key in parameters if key not in _FROM_EXPERIMENT]
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
        if hparams[name] == EPOCH:
            columns[name] = np.array([epoch_steps(size, batch_size) for size in num_examples.values()], np.int32)
        else:
            columns[name] = np.full(len(num_examples), hparams[name], hparam_dtype(default))
    return columns


def epoch_steps(num_examples: int, batch_size: int) -> int:
    """How many whole batches an epoch has, and at least one.

    >>> epoch_steps(175, 32), epoch_steps(15, 32)
    (5, 1)
    """
    return max(1, num_examples // batch_size)


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
    if (name, value) in (("local_steps", EPOCH), ("prox_weight", AUTO)):
        return
    wanted = int if isinstance(default, int) else (int, float)
    lowest = 1 if name == "local_steps" else 0
    if isinstance(value, bool) or not isinstance(value, wanted) or not lowest <= value < math.inf:
        word = {"local_steps": f" or {EPOCH!r}", "prox_weight": f" or {AUTO!r}"}.get(name, "")
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


def _argument(key: str, value: Any, default: Any) -> Any:
    """A builder's argument, of the type of its default."""
    kind = type(default)
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
