"""Defines what a personalised federated algorithm is: one frozen value of pure TensorFlow functions over weights.

An algorithm knows nothing of noise, of TFF or of engines. It receives a `grad_fn` that may sample, clip and add
noise, and the values it releases go through an aggregator that may do the same. What leaves a client is exactly what
`released` names; how often a local step touches the data is `data_passes`, how often a model is chosen by its fit to
the data `selection_rounds`. The privacy plan reads those fields.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import tensorflow as tf

from tff_pdp.algorithms.hyper_parameters import Hook, HParam, count_gradients, step_names
from tff_pdp.models.base import Weights

# A nest of named tensors; an empty mapping where an algorithm keeps nothing.
State = Mapping[str, Any]
# `rows`: the server has one row for each client, by `client_index`, and knows who is `present` in a round.
AggregationKind = Literal["mean", "sum", "rows"]
PublicKind = Literal["weighted_mean"]
# What can be `SET_BY_RUNTIME`.
RUNTIME_HPARAMS = ("client_index",)


class ClientData(NamedTuple):
    """One client's training examples, perhaps padded.

    Attributes:
      x: float32 `[n, *input_shape]`.
      y: `[n]`, of the model's label type.
      num_examples: int32 scalar, at most n; rows from there on are padding.
    """

    x: tf.Tensor
    y: tf.Tensor
    num_examples: tf.Tensor


class ClientResult(NamedTuple):
    """What a client step returns: the state it keeps, and the named values it releases."""

    state: State
    released: Mapping[str, Weights]


class GradFn(Protocol):
    """A client's gradient, private where the plan asks for it."""

    def __call__(
        self,
        weights: Weights,
        data: ClientData,
        index: tf.Tensor,
        scale: tf.Tensor,
        pull: Weights | None = None,
        trainable: Sequence[str] | None = None,
        /,
    ) -> Weights:
        """Returns `scale * gradient`, with the structure of the weights, or of the trainable ones.

        Args:
          weights: where to take it.
          data: the client's examples.
          index: int32, which of the round's gradients it is, from 0 to local steps times data passes. Batch and noise
            are those of the index, so each may be asked for once: the difference of two answers would carry no noise.
          scale: float32, the learning rate. Applied to the losses it costs nothing; applied to the gradient it would
            cost a pass over all weights, and such passes are what a step with a small batch consists of.
          pull: added to each example's gradient before it is clipped. Nothing private depends on whether a method does
            that or adds it afterwards; what is learned does.
          trainable: names of the weights to take it for, the others being constants; all by default.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GradientEstimator:
    """Where a client's `grad_fn` comes from: which examples a step uses, and what becomes of their gradients.

    Attributes:
      mechanism: names of the float32 scalars it takes from each client.
      draw: `(mechanism [clients], num_examples [clients], max_examples, num_steps [clients], seeds [clients, 2]) ->
        draws`: all that the clients' rounds draw at random, with a leading axis of clients. `max_examples` is the size
        their data are padded to, a step one gradient. What is drawn for a client must not depend on the others.
      gradient: `(mechanism, draws, weights, data, index, scale, pull, trainable) -> scale * gradient`, for one client;
        see `GradFn`. The data has at least one row, of zeros where the client has no examples. The scale must not be a
        function of the data. Where it is zero, as in the steps of a stack after a client's own, the result must be
        zero, too.
    """

    mechanism: tuple[str, ...]
    draw: Callable[[Mapping[str, tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], Any]
    gradient: Callable[..., Weights]


@dataclasses.dataclass(frozen=True)
class Export:
    """How the models of trained clients may be stored. Which weights clients own is seen from the models themselves.

    Attributes:
      served_from_state: a client's model is made from a state that is small next to it, by `personalise` alone: an
        export may hold what `broadcast` returns once, the client states in place of models, and `personalise` itself.
        Nothing may be done to a state before, so there is no `adapt`, and `init_client` must be the state that
        `global_model` is made from, which unknown clients get.
      serves_candidates: the model that `personalise` returns is always one of the `candidates`, never a client's own:
        a client that comes after training need only select one.
    """

    served_from_state: bool = False
    serves_candidates: bool = False


@dataclasses.dataclass(frozen=True)
class Claims:
    """What a method makes of a privacy plan's guarantee; by default, nothing.

    Attributes:
      condition: under which condition a guarantee holds, if only under one, besides those of the privacy plan.
      unsound: why nothing is guaranteed whatever the privacy plan is, if so.
      noised_size: `initial weights -> number of values` that noise on a release changes anything by; by default, all.
      noise_on_own_support: the noise of a released value is limited to where the client's own value is not zero. It
        then protects nobody; for a paper's variant only.
    """

    condition: str = ""
    unsound: str = ""
    noised_size: Callable[[Weights], int] | None = None
    noise_on_own_support: bool = False


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A personalised federated algorithm.

    FedAvg, with a client update that ends in `ClientResult(state={}, released={"update": update})`:

        Algorithm(
            name="fed_avg",
            title="FedAvg",
            hparams={"learning_rate": HParam(0.1, "learning rate", symbol="η"), "local_steps": Steps(1, symbol="τ")},
            released={"update": "mean"},
            data_passes=1,
            init_client=lambda broadcast: {},
            client_update=client_update,
            personalise=lambda broadcast, client_state: broadcast["weights"],
        )

    By default the server is that of FedAvg: its state is a shared model's `weights`, plus the mean `update`.

    Attributes:
      name: its name in `tff_pdp.experiment.kinds.ALGORITHMS`.
      title: its name for a reader.
      hparams: hyper-parameters by name. Each becomes a scalar on every client, so that clients may have values of their
        own without another compilation; numbers of steps arrive as `LocalSteps`, in the order of `hparams` their
        gradients are numbered in. `client_index`, which is `SET_BY_RUNTIME`, counts the clients from 0.
      released: what leaves a client, and how the server combines it; `rows` become `{rows: [num_clients, ...], present:
        [num_clients]}`, where rows of clients that do not take part are zeros.
      data_passes: number of gradient computations on local data for each local step (2 for Ditto), each with an index
        of its own.
      init_client: `broadcast -> state of a client that takes part for the first time`.
      client_update: `(broadcast, client state, data, grad_fn, hparams) -> ClientResult`.
      personalise: `(broadcast, client state) -> weights of that client's model`; of its adapted state, where it adapts.
      init_server: `initial weights -> server state`.
      broadcast: `server state -> what every client receives`.
      server_update: `(server state, aggregates by name, released or public) -> server state`.
      global_model: `server state -> weights of the shared model`, or None where the method has none.
      public: scalars that the server learns besides, by name, each a mean in which clients count as they do in means of
        what is released.
      public_values: `hyper-parameters -> public scalars`, of each client. It is given no data, so that a privacy plan
        need only see that hyper-parameters are public.
      num_clients: how many clients there are, of methods that release `rows`.
      candidates: `broadcast -> weights of several models`, stacked along a first axis: a client privately selects the
        one that fits its data best, and finds its number, int32, in the hyper-parameter `selected`. None for methods
        that select nothing.
      selection_rounds: how many rounds, from the first, clients select in; afterwards `selected` is -1.
      adapt: `(broadcast, client state, data, grad_fn, hparams) -> adapted state`, of any form: what a client does for
        itself before its model is used, with as many gradients as the `Steps` say that are `in_adapt`. Nothing of it
        leaves the client, so it costs nothing where users are protected; None where there is nothing to do.
      needs_everyone: the method is right only where every client takes part in every round, or leaves for good: the
        server's state, or that of a client who comes late, assumes so. Users, of whom some are drawn, cannot have it.
      hook: `(PrivacyPlan.public_parameters, number of the model's weights) -> Hook`, which sets the hyper-parameters
        that a configuration leaves to `auto`; None where there are none.
      export: how clients' models may be stored.
      claims: what the method makes of the privacy plan's guarantee.
    """

    name: str
    title: str
    hparams: Mapping[str, HParam]
    released: Mapping[str, AggregationKind]
    data_passes: int
    init_client: Callable[[State], State]
    client_update: Callable[[State, State, ClientData, GradFn, Mapping[str, Any]], ClientResult]
    personalise: Callable[[State, State], Weights]
    init_server: Callable[[Weights], State] = lambda weights: {"weights": weights}
    broadcast: Callable[[State], State] = lambda state: {"weights": state["weights"]}
    server_update: Callable[[State, Mapping[str, Weights]], State] = lambda state, aggregates: {
        "weights": map_weights(lambda w, u: w + u, state["weights"], aggregates["update"])
    }
    global_model: Callable[[State], Weights] | None = lambda state: state["weights"]
    public: Mapping[str, PublicKind] = dataclasses.field(default_factory=dict)
    public_values: Callable[[Mapping[str, Any]], Mapping[str, tf.Tensor]] | None = None
    num_clients: int | None = None
    candidates: Callable[[State], Weights] | None = None
    selection_rounds: int = 0
    adapt: Callable[[State, State, ClientData, GradFn, Mapping[str, Any]], State] | None = None
    needs_everyone: bool = False
    hook: Callable[[Any, int], Hook] | None = None
    export: Export = Export()
    claims: Claims = Claims()

    def __post_init__(self):
        unknown = [name for name, one in self.hparams.items() if one.is_set_by_runtime and name not in RUNTIME_HPARAMS]
        if unknown:
            raise ValueError(f"{self.name}: only {', '.join(RUNTIME_HPARAMS)} can be SET_BY_RUNTIME, not {unknown}")
        if bool(self.public) != (self.public_values is not None) or set(self.public) & set(self.released):
            raise ValueError(f"{self.name}: public scalars need names of their own, and `public_values`")
        if "rows" in self.released.values() and (self.num_clients is None or "client_index" not in self.hparams):
            raise ValueError(f"{self.name}: rows need `num_clients`, and `client_index` to know their places")

    @property
    def step_hparams(self) -> Sequence[str]:
        """The hyper-parameters that count steps of a round."""
        return step_names(self.hparams)

    @property
    def defaults(self) -> dict[str, float | int]:
        """Default of each hyper-parameter that a configuration may set, by name."""
        return {name: one.default for name, one in self.hparams.items() if not one.is_set_by_runtime}

    def num_gradients(self, hparams: Mapping[str, Any]) -> Any:
        """How many gradients a client asks for in a round, of hyper-parameters as numbers, arrays or tensors."""
        return self.data_passes * count_gradients(self.hparams, hparams)


def map_weights(function: Callable[..., tf.Tensor], *weights: Weights) -> Weights:
    """Applies `function` to the tensors of the same name, in the order of the first argument."""
    first, *others = weights
    return collections.OrderedDict(
        (name, function(tensor, *(other[name] for other in others))) for name, tensor in first.items()
    )


def choose(condition: tf.Tensor, if_true: Weights, if_false: Weights) -> Weights:
    """One of two sets of weights, by a bool scalar."""
    return map_weights(lambda one, other: tf.where(condition, one, other), if_true, if_false)


def split(weights: Weights, names: Sequence[str]) -> tuple[Weights, Weights]:
    """The weights of some names, and the others, each in their order."""
    chosen, others = collections.OrderedDict(), collections.OrderedDict()
    for name, value in weights.items():
        (chosen if name in names else others)[name] = value
    return chosen, others


def merge(weights: Weights, *parts: Weights) -> Weights:
    """The weights, with those of the parts in their place; in the order of the first argument."""
    replaced = {name: value for part in parts for name, value in part.items()}
    return collections.OrderedDict((name, replaced.get(name, value)) for name, value in weights.items())


def put_in_place(weights: Weights, place: tf.Tensor) -> Weights:
    """Weights with a first axis of places: themselves in their own, which is one-hot float32 `[places]`, and zeros."""
    return map_weights(lambda value: tf.reshape(place, [-1] + [1] * value.shape.rank) * value[tf.newaxis], weights)


def rounds_of(fraction: float, rounds: int) -> int:
    """How many rounds a fraction of all rounds is: rounded up, and at least one where it is not zero."""
    # A hair less, so that 10 % of 200 rounds is 20 although 0.1 * 200 may be a little more.
    return min(rounds, math.ceil(fraction * rounds * (1 - 1e-9)))
