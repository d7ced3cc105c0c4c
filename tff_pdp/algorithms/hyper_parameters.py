"""Declares hyper-parameters (numbers that may differ between clients), and hooks that set them during training."""

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import tensorflow as tf
from msgspec import Meta
from msgspec import inspect as types

from tff_pdp.errors import ConfigError
from tff_pdp.settings import words_of_type

# In place of a value in a configuration: a hook sets the hyper-parameter.
AUTO = "auto"
# A number of epochs of whole batches, in place of a number of steps.
_EPOCHS = re.compile(r"epoch|([1-9][0-9]*) epochs?")


class Observed(NamedTuple):
    """The state of a training between two rounds, as a hook receives it.

    Attributes:
      round_number: number of rounds that have been run.
      server_state: the algorithm's state at the server.
      client_states: states of all clients, each leaf with a first axis of clients.
    """

    round_number: int
    server_state: Mapping[str, Any]
    client_states: Mapping[str, Any]


class Hook:
    """Sets hyper-parameters during training from states that are already private; this base class sets none.

    A hook is built from a training's public parameters (`PrivacyPlan.public_parameters`), and runs outside of TFF
    computations. A hook's memory is a nest of arrays, which checkpoints include.

    Guarantee: post-processing; a hook costs no epsilon.
    Assumes: a hook reads only released parts of clients' states, such as the iterates of DP-SGD.
    """

    def init(self) -> Mapping[str, Any]:
        """Returns the memory before the first round."""
        return {}

    def hparams(self, state: Mapping[str, Any], places: np.ndarray) -> Mapping[str, np.ndarray]:
        """Returns a round's hyper-parameters by name, `[clients]`, from the memory and the client indices `places`."""
        return {}

    def after(self, state: Mapping[str, Any], before: Observed, after: Observed) -> Mapping[str, Any]:
        """Returns the memory after a round, from the memory before it and the training's states before and after."""
        return state


class LocalSteps(NamedTuple):
    """A client's number of steps: the value of a hyper-parameter such as `local_steps` inside a computation.

    Attributes:
      count: number of steps of this client, int32 scalar, at least 1.
      bound: upper bound of `count`, int32 scalar, the same for all clients that are computed together.
    """

    count: tf.Tensor
    bound: tf.Tensor


@dataclasses.dataclass(frozen=True)
class HParam:
    """A hyper-parameter of an algorithm: on each client a float32 scalar, or int32 if the default is a whole number.

    Attributes:
      default: value if a configuration has none.
      meaning: description for readers, a noun phrase.
      symbol: symbol in the method's paper.
      unit: unit of the value; empty for a number without unit.
      low: smallest allowed value.
      high: largest allowed value.
      is_auto: whether a configuration may have the value `auto`: the algorithm's hook then sets the hyper-parameter.
      not_auto: reason why `auto` is not allowed, for the message that refuses it.
      is_set_by_runtime: whether `Method` sets the value; a configuration then may not.
    """

    default: float | int
    meaning: str = ""
    symbol: str = ""
    unit: str = ""
    low: float = 0.0
    high: float = sys.float_info.max
    is_auto: bool = False
    not_auto: str = ""
    is_set_by_runtime: bool = False

    # Whether a private search may try values. It may not try numbers of steps, which decide the noise multiplier.
    is_searched: ClassVar[bool] = True

    @property
    def dtype(self) -> type[np.generic]:
        """NumPy type of the scalars: int32 or float32."""
        return np.int32 if isinstance(self.default, int) else np.float32

    @property
    def hint(self) -> Any:
        """Type annotation that accepts exactly the allowed numbers."""
        if isinstance(self.default, int):
            return Annotated[int, Meta(ge=int(self.low), le=int(min(self.high, np.iinfo(np.int32).max)))]
        return Annotated[float, Meta(ge=self.low, le=self.high)]

    @property
    def words(self) -> str:
        """Values allowed in a configuration, in words."""
        of_numbers = words_of_type(types.type_info(self.hint)).removesuffix(f" and at most {np.iinfo(np.int32).max:g}")
        return f"{of_numbers}, or {AUTO}" if self.is_auto else of_numbers

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the values allowed in a configuration."""
        numbers = msgspec.json.schema(self.hint)
        return {"anyOf": [numbers, {"const": AUTO}]} if self.is_auto else numbers

    def check(self, key: str, value: Any) -> None:
        """Checks a configuration's value of the hyper-parameter; messages name the key.

        Raises:
          ConfigError: the value has the wrong type or is out of range.
        """
        if value == AUTO and self.is_auto:
            return
        try:
            msgspec.convert(value, self.hint)
        except msgspec.ValidationError:
            reason = f": {self.not_auto}" if value == AUTO and self.not_auto else ""
            raise ConfigError(f"{key} must be {self.words}, not {value!r}{reason}") from None


@dataclasses.dataclass(frozen=True)
class Steps(HParam):
    """A hyper-parameter that is a number of local steps; algorithms receive its value as a `LocalSteps`.

    Attributes:
      factors: names of other `Steps`; each step takes as many gradients as the product of their values, by default one.
      in_adapt: whether the steps are taken in `Algorithm.adapt` and not in a round.
    """

    unit: str = "steps"
    low: float = 1
    factors: tuple[str, ...] = ()
    in_adapt: bool = False

    is_searched: ClassVar[bool] = False

    @property
    def words(self) -> str:
        """Values allowed in a configuration, in words."""
        return f"{super().words}, or epochs, such as '5 epochs'"

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the values allowed in a configuration."""
        return {"anyOf": [super().schema, {"type": "string", "pattern": f"^({_EPOCHS.pattern})$"}]}

    def check(self, key: str, value: Any) -> None:
        """Checks a value as `HParam.check` does, but also allows a number of epochs."""
        if not read_epochs(value):
            super().check(key, value)


def read_epochs(value: Any) -> int | None:
    """Returns the number of epochs; None for a number of steps.

    An epoch has one step per whole batch, and at least one step.

    >>> read_epochs("epoch"), read_epochs("5 epochs"), read_epochs(3)
    (1, 5, None)
    """
    match = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    return int(match[1] or 1) if match else None


def count_gradients(hparams: Mapping[str, HParam], values: Mapping[str, Any], *, in_adapt: bool = False) -> Any:
    """Counts the gradients per data pass in a round, or in `Algorithm.adapt`; values are numbers, arrays or tensors."""
    steps = {name: one for name, one in hparams.items() if isinstance(one, Steps) and one.in_adapt == in_adapt}
    factors = {factor for one in steps.values() for factor in one.factors}
    return sum(
        math.prod((values[factor] for factor in one.factors), start=values[name])
        for name, one in steps.items()
        if name not in factors
    )


def step_names(hparams: Mapping[str, HParam], *, in_adapt: bool = False) -> Sequence[str]:
    """Returns the names, in order, of the `Steps` of a round or, with `in_adapt`, of `Algorithm.adapt`."""
    return tuple(name for name, one in hparams.items() if isinstance(one, Steps) and one.in_adapt == in_adapt)


# A client's number, counted from 0: `client_index`.
SET_BY_RUNTIME = HParam(0, is_set_by_runtime=True)
# The epsilon of a client's own privacy budget: `budget_epsilon`; infinite without a budget.
BUDGET_EPSILON = HParam(math.inf, is_set_by_runtime=True)
LEARNING_RATE = HParam(0.1, "learning rate of local steps", symbol="η", unit="weight² per loss")
LOCAL_STEPS = Steps(1, "length of a client's round", symbol="τ")
# Hyper-parameters of methods that take only local steps.
LOCAL_TRAINING: Mapping[str, HParam] = {"learning_rate": LEARNING_RATE, "local_steps": LOCAL_STEPS}
HEAD_LEARNING_RATE = HParam(0.1, "learning rate of steps on the head", symbol="η_h", unit="weight² per loss")
HEAD_STEPS = Steps(10, "length of a client's training of its head in a round, before the body", symbol="τ_h")
ADAPT_STEPS = Steps(10, "length of a client's training before its model is used", symbol="τ_a", in_adapt=True)


def prox_weight(default: float, pulled_to: str = "the shared weights", **options: Any) -> HParam:
    """Builds the hyper-parameter lambda, a pull's strength. The pull is the gradient of `lambda/2 * |w - anchor|^2`."""
    return HParam(default, f"strength of the pull to {pulled_to}", symbol="λ", unit="loss per weight²", **options)
