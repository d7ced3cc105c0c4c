"""Defines what a personalised federated algorithm is: one frozen value of pure TensorFlow functions over weights.

An algorithm does not depend on noise, TFF or engines. It receives a `grad_fn` that may sample, clip and add noise, and
its released values go through an aggregator, which may clip and add noise, too. Only values named in `released` leave a
client. The privacy plan reads `data_passes`, the number of gradients per local step, and `selection_rounds`, the number
of rounds in which each client selects the model that fits its data best.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.hyper_parameters import Hook, HParam, count_gradients, step_names
from tff_pdp.models.base import Weights

# A nest of named tensors; an empty mapping where an algorithm keeps nothing.
State = Mapping[str, Any]
# `rows`: the server has one row for each client, by `client_index`, and knows which clients are `present` in a round.
AggregationKind = Literal["mean", "sum", "rows"]
PublicKind = Literal["weighted_mean"]
# Names of the hyper-parameters that may be set by the runtime: `SET_BY_RUNTIME` and `BUDGET_EPSILON`.
RUNTIME_HPARAMS = ("client_index", "budget_epsilon")


class ClientData(NamedTuple):
    """One client's training examples, perhaps padded.

    Attributes:
      x: features, float32 `[n, *input_shape]`.
      y: labels, `[n]`, of the model's label type.
      num_examples: int32 scalar, at most n; the rows from `num_examples` on are padding.
    """

    x: tf.Tensor
    y: tf.Tensor
    num_examples: tf.Tensor


class ClientResult(NamedTuple):
    """The result of a client's round.

    Attributes:
      state: state that the client keeps for its next round.
      released: weights that leave the client, by the names in `Algorithm.released`.
    """

    state: State
    released: Mapping[str, Weights]


class Traffic(NamedTuple):
    """The numbers of float32 values that real clients would send and receive in a round.

    In a simulation all clients send and receive the same types, so simulated messages may be larger.

    Attributes:
      uplink: numbers of values from client to server, float64 `[clients]`.
      downlink: numbers of values from server to client, float64 `[clients]`.
    """

    uplink: np.ndarray
    downlink: np.ndarray


class GradFn(Protocol):
    """A function that computes a client's gradient, private if the privacy plan requires it."""

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
        """Returns `scale * gradient` by name, for all weights or only for the trainable ones.

        Args:
          weights: the weights at which the gradient is taken.
          data: the client's examples.
          index: int32, number of the gradient in the round, from 0 to `local steps * data passes - 1`. It determines
            batch and noise, so use each index once: two results for one index have the same noise.
          scale: float32, the learning rate. Multiplying the losses by it costs nothing; multiplying the gradient would
            cost a pass over all weights, which is most of the cost of a step with a small batch.
          pull: value added to each example's gradient before the clip. A method that adds the pull after the clip has
            the same privacy, but another objective.
          trainable: names of the weights to differentiate by; by default all. All other weights are constants.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GradientEstimator:
    """The functions that a client's `grad_fn` is made of: the draw of a step's examples, and the gradient.

    Attributes:
      mechanism: names of the float32 scalars, one per client, that both functions take as their argument `mechanism`.
      draw: `(mechanism [clients], num_examples [clients], max_examples, num_steps [clients], seeds [clients, 2]) ->
        draws`: all random draws of the clients' rounds, with a leading axis of clients. `max_examples` is the number
        of rows of the padded data; a step is one gradient. A client's draws must not depend on the other clients.
      gradient: `(mechanism, draws, weights, data, index, scale, pull, trainable) -> scale * gradient`, for one client;
        see `GradFn`. The data have at least one row, of zeros if the client has no examples. The scale must not be a
        function of the data. If the scale is zero, the result must be zero: a stack of clients runs until every client
        has taken all its steps, with scale zero for clients that are done.
    """

    mechanism: tuple[str, ...]
    draw: Callable[[Mapping[str, tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], Any]
    gradient: Callable[..., Weights]


@dataclasses.dataclass(frozen=True)
class Export:
    """The ways in which clients' trained models may be stored; the export itself finds out which weights clients own.

    Attributes:
      served_from_state: whether `personalise` alone makes a client's model from a small state. An export may then hold
        the broadcast once, client states in place of models, and `personalise` itself. The method must have no `adapt`;
        `init_client` must return the state that gives `global_model`, which serves unknown clients.
      serves_candidates: whether `personalise` always returns one of the `candidates`, never a model of the client's
        own: a client that joins after training then only selects one.
    """

    served_from_state: bool = False
    serves_candidates: bool = False


@dataclasses.dataclass(frozen=True)
class Claims:
    """The changes that a method makes to a privacy plan's guarantee; by default, none.

    Attributes:
      condition: condition of the guarantee, in addition to the privacy plan's conditions; empty for none.
      unsound: reason why nothing is guaranteed under any privacy plan; empty if the plan's guarantee holds.
      noised_size: `initial weights -> number of released values whose noise has an effect`; by default all of them.
      noise_on_own_support: whether noise is added only to coordinates where the client's own value is not zero. Such
        noise protects nobody; the field exists for one paper's variant.
    """

    condition: str = ""
    unsound: str = ""
    noised_size: Callable[[Weights], int] | None = None
    noise_on_own_support: bool = False


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A personalised federated algorithm.

    For example FedAvg, whose client update returns `ClientResult(state={}, released={"update": update})`:

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

    By default, as in FedAvg, the server's state is a shared model's `weights`, to which it adds the mean `update`.

    Attributes:
      name: name of the method in `tff_pdp.experiment.kinds.ALGORITHMS`.
      title: name of the method in reports.
      hparams: hyper-parameters by name. Each becomes a scalar on every client, so clients may have values of their own
        without another compilation. Numbers of steps are `LocalSteps`; if there are several, gradient indices follow
        their order in `hparams`. `client_index`, which is `SET_BY_RUNTIME`, is the client's number, from 0;
        `budget_epsilon`, which is `BUDGET_EPSILON`, is the epsilon of the client's own budget, infinite without one.
      released: names of the values that leave a client, each with its aggregation at the server. The aggregate of
        `rows` is `{rows: [num_clients, ...], present: [num_clients]}`; rows of clients that do not take part are zeros.
      data_passes: number of gradients on local data per local step (2 for Ditto), each with an index of its own.
      init_client: `broadcast -> state of a client that takes part for the first time`.
      client_update: `(broadcast, client state, data, grad_fn, hparams) -> ClientResult`.
      personalise: `(broadcast, client state) -> weights of the client's model`; with `adapt`, from the adapted state.
      init_server: `initial weights -> server state`.
      broadcast: `server state -> what every client receives`.
      server_update: `(server state, aggregates by name, released or public) -> server state`.
      global_model: `server state -> weights of the shared model`, or None where the method has none.
      public: names of further public scalars. The server receives their mean over the clients, in which clients have
        the weights that they have in means of released values.
      public_values: `hyper-parameters -> public scalars` of one client. The function gets no data, so a privacy plan
        only has to check that hyper-parameters are public.
      num_clients: number of all clients, for methods that release `rows`.
      candidates: `broadcast -> weights of several models`, stacked along a first axis. A client privately selects the
        model that fits its data best; the model's number is hyper-parameter `selected`, int32. None for methods without
        selection.
      selection_rounds: number of rounds, from the first, in which clients select; afterwards `selected` is -1.
      adapt: `(broadcast, client state, data, grad_fn, hparams) -> adapted state`, of any structure: tunes a client's
        model before use, with as many gradients as the `Steps` with `in_adapt` allow. The adapted state never leaves
        the client, so it costs no budget under user-level privacy. None for methods without tuning.
      adaptation_start: `(broadcast, client state) -> weights` from which a client adapts to its records, after rounds
        on synthetic data (`tff_pdp.algorithms.phases`); None for `personalise`.
      needs_everyone: whether the method is right only if every client takes part in every round until it leaves for
        good, since the server's state, or a late client's first state, assumes this. User-level plans, which draw some
        users for each round, refuse such methods.
      hook: `(PrivacyPlan.public_parameters, number of the model's weights) -> Hook`, which sets the hyper-parameters
        that are `auto` in a configuration; None if none may be `auto`.
      traffic: `(server state after the first round, number of a round, from 1) -> Traffic` of clients that take part;
        None where each client receives the broadcast and sends its releases.
      warning: `server state after the first round or a later one -> text` for the person who trains; empty for none.
      export: the ways in which clients' models may be stored.
      claims: the changes that the method makes to the privacy plan's guarantee.
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
    adaptation_start: Callable[[State, State], Weights] | None = None
    needs_everyone: bool = False
    hook: Callable[[Any, int], Hook] | None = None
    traffic: Callable[[State, int], Traffic] | None = None
    warning: Callable[[State], str] | None = None
    export: Export = Export()
    claims: Claims = Claims()

    def __post_init__(self):
        unknown = [name for name, one in self.hparams.items() if one.is_set_by_runtime and name not in RUNTIME_HPARAMS]
        if unknown:
            raise ValueError(f"{self.name}: only {', '.join(RUNTIME_HPARAMS)} can be set by the runtime, not {unknown}")
        if bool(self.public) != (self.public_values is not None) or set(self.public) & set(self.released):
            raise ValueError(f"{self.name}: set `public` and `public_values` together; no name may also be `released`")
        if "rows" in self.released.values() and (self.num_clients is None or "client_index" not in self.hparams):
            raise ValueError(f"{self.name}: released `rows` need `num_clients` and the hyper-parameter `client_index`")

    @property
    def step_hparams(self) -> Sequence[str]:
        """Names of the hyper-parameters that are numbers of steps in a round."""
        return step_names(self.hparams)

    @property
    def defaults(self) -> dict[str, float | int]:
        """Default of each hyper-parameter that a configuration may set, by name."""
        return {name: one.default for name, one in self.hparams.items() if not one.is_set_by_runtime}

    def num_gradients(self, hparams: Mapping[str, Any]) -> Any:
        """Returns the number of gradients in a client's round; `hparams` are numbers, arrays or tensors."""
        return self.data_passes * count_gradients(self.hparams, hparams)


def map_weights(function: Callable[..., tf.Tensor], *weights: Weights) -> Weights:
    """Applies `function` to the tensors of equal name in all `weights`; the result has the order of the first."""
    first, *others = weights
    return collections.OrderedDict(
        (name, function(tensor, *(other[name] for other in others))) for name, tensor in first.items()
    )


def choose(condition: tf.Tensor, if_true: Weights, if_false: Weights) -> Weights:
    """Returns `if_true` if `condition`, a bool scalar, is true, else `if_false`."""
    return map_weights(lambda one, other: tf.where(condition, one, other), if_true, if_false)


def split(weights: Weights, names: Sequence[str]) -> tuple[Weights, Weights]:
    """Returns two mappings: the weights in `names`, and all other weights. Both keep the order."""
    chosen, others = collections.OrderedDict(), collections.OrderedDict()
    for name, value in weights.items():
        (chosen if name in names else others)[name] = value
    return chosen, others


def merge(weights: Weights, *parts: Weights) -> Weights:
    """Returns `weights`, in their order; a tensor of `parts` replaces the tensor of equal name."""
    replaced = {name: value for part in parts for name, value in part.items()}
    return collections.OrderedDict((name, replaced.get(name, value)) for name, value in weights.items())


def put_in_place(weights: Weights, place: tf.Tensor) -> Weights:
    """Returns weights with a new first axis: the given weights at one index, zeros at all other indices.

    Args:
      weights: tensors by name.
      place: float32 `[size of the new axis]`, one-hot at this index.
    """
    return map_weights(lambda value: tf.reshape(place, [-1] + [1] * value.shape.rank) * value[tf.newaxis], weights)


def rounds_of(fraction: float, rounds: int) -> int:
    """Returns `fraction` times `rounds`, rounded up: at least 1 if the fraction is above 0."""
    # A hair less, so that 10 % of 200 rounds is 20 although 0.1 * 200 may be a little more.
    return min(rounds, math.ceil(fraction * rounds * (1 - 1e-9)))
