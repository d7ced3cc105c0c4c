"""Declares hyper-parameters: numbers that every client may have its own of, and what may set them during training."""

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
# As many steps as make some epochs of whole batches.
_EPOCHS = re.compile(r"epoch|([1-9][0-9]*) epochs?")


class Observed(NamedTuple):
    """A state of training, as hooks see it.

    Attributes:
      round_number: rounds that have been run.
      server_state: the algorithm's.
      client_states: of all clients, each leaf with a first axis of clients.
    """

    round_number: int
    server_state: Mapping[str, Any]
    client_states: Mapping[str, Any]


class Hook:
    """Sets hyper-parameters during training from states that are private already; by default, none.

    A hook is made of what is public of a training (`PrivacyPlan.public_parameters`), and runs outside of computations.
    Its memory is a nest of arrays, which a checkpoint keeps.

    Guarantee: post-processing; a hook costs no epsilon.
    Assumes: all that a hook reads of clients' states is released, as the iterates of DP-SGD are.
    """

    def init(self) -> Mapping[str, Any]:
        """Returns the memory before the first round."""
        return {}

    def hparams(self, state: Mapping[str, Any], places: np.ndarray) -> Mapping[str, np.ndarray]:
        """Returns a round's hyper-parameters, `[clients]` by name, of the memory and of the clients' places, int64."""
        return {}

    def after(self, state: Mapping[str, Any], before: Observed, after: Observed) -> Mapping[str, Any]:
        """Returns the memory after a round, by the memory and training before the round, and training after it."""
        return state


class LocalSteps(NamedTuple):
    """How many steps a client takes; the value of a hyper-parameter such as `local_steps` inside a computation.

    Attributes:
      count: int32 scalar, at least 1.
      bound: int32 scalar, at least `count`, and the same for all clients computed together.
    """

    count: tf.Tensor
    bound: tf.Tensor


@dataclasses.dataclass(frozen=True)
class HParam:
    """A hyper-parameter of an algorithm: on each client a float32 scalar, or int32 where the default is a whole number.

    Attributes:
      default: where a configuration names no value.
      meaning: for a reader, a phrase.
      symbol: in the method's paper.
      unit: of the value; empty for a mere number.
      low: smallest value.
      high: largest value.
      is_auto: a configuration may say `auto`: the algorithm's hook then sets the hyper-parameter.
      not_auto: why it may not, for the message that refuses `auto`.
      is_set_by_runtime: `Method` fills it in, and a configuration may not.
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

    # Whether a private search may try values: numbers of steps decide how much noise they need.
    is_searched: ClassVar[bool] = True

    @property
    def dtype(self) -> type[np.generic]:
        """Of the scalars: int32 or float32."""
        return np.int32 if isinstance(self.default, int) else np.float32

    @property
    def hint(self) -> Any:
        """Type of the numbers in range."""
        if isinstance(self.default, int):
            return Annotated[int, Meta(ge=int(self.low), le=int(min(self.high, np.iinfo(np.int32).max)))]
        return Annotated[float, Meta(ge=self.low, le=self.high)]

    @property
    def words(self) -> str:
        """What a configuration may say, in words."""
        of_numbers = words_of_type(types.type_info(self.hint)).removesuffix(f" and at most {np.iinfo(np.int32).max:g}")
        return f"{of_numbers}, or {AUTO}" if self.is_auto else of_numbers

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of what a configuration may say."""
        numbers = msgspec.json.schema(self.hint)
        return {"anyOf": [numbers, {"const": AUTO}]} if self.is_auto else numbers

    def check(self, key: str, value: Any) -> None:
        """Checks a value as a configuration gives it; the key says in messages where that stands.

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
    """A number of local steps: algorithms find `LocalSteps`.

    Attributes:
      factors: names of further `Steps`: each of these steps takes as many gradients as their product says.
      in_adapt: counts steps of `Algorithm.adapt`, and none of a round.
    """

    unit: str = "steps"
    low: float = 1
    factors: tuple[str, ...] = ()
    in_adapt: bool = False

    is_searched: ClassVar[bool] = False

    @property
    def words(self) -> str:
        """What a configuration may say, in words."""
        return f"{super().words}, or epochs, such as '5 epochs'"

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of what a configuration may say."""
        return {"anyOf": [super().schema, {"type": "string", "pattern": f"^({_EPOCHS.pattern})$"}]}

    def check(self, key: str, value: Any) -> None:
        """As of `HParam`; some epochs are a number of steps, too."""
        if not read_epochs(value):
            super().check(key, value)


def read_epochs(value: Any) -> int | None:
    """How many epochs a number of steps is, if it is given so; an epoch is as many whole batches as there are, or one.

    >>> read_epochs("epoch"), read_epochs("5 epochs"), read_epochs(3)
    (1, 5, None)
    """
    match = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    return int(match[1] or 1) if match else None


def count_gradients(hparams: Mapping[str, HParam], values: Mapping[str, Any], *, in_adapt: bool = False) -> Any:
    """How many gradients all steps of a round, or of an adaptation, take; values are numbers, arrays or tensors."""
    steps = {name: one for name, one in hparams.items() if isinstance(one, Steps) and one.in_adapt == in_adapt}
    factors = {factor for one in steps.values() for factor in one.factors}
    return sum(
        math.prod((values[factor] for factor in one.factors), start=values[name])
        for name, one in steps.items()
        if name not in factors
    )


def step_names(hparams: Mapping[str, HParam], *, in_adapt: bool = False) -> Sequence[str]:
    """The hyper-parameters that count steps of a round, or of an adaptation, in order."""
    return tuple(name for name, one in hparams.items() if isinstance(one, Steps) and one.in_adapt == in_adapt)


# The number of a client, from 0: who it is.
SET_BY_RUNTIME = HParam(0, is_set_by_runtime=True)
LEARNING_RATE = HParam(0.1, "learning rate of local steps", symbol="η", unit="weight² per loss")
LOCAL_STEPS = Steps(1, "length of a client's round", symbol="τ")
# Of methods that take local steps alone.
LOCAL_TRAINING: Mapping[str, HParam] = {"learning_rate": LEARNING_RATE, "local_steps": LOCAL_STEPS}
HEAD_LEARNING_RATE = HParam(0.1, "learning rate of steps on the head", symbol="η_h", unit="weight² per loss")
HEAD_STEPS = Steps(10, "how long a client trains its head in a round, before the body", symbol="τ_h")
ADAPT_STEPS = Steps(10, "how long a client trains before its model is used", symbol="τ_a", in_adapt=True)


def prox_weight(default: float, pulled_to: str = "the shared weights", **options: Any) -> HParam:
    """The strength of a pull to an anchor, lambda: the gradient of `lambda / 2 * |w - anchor|^2`."""
    return HParam(default, f"strength of the pull to {pulled_to}", symbol="λ", unit="loss per weight²", **options)
