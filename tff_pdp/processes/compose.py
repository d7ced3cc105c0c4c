"""Composes algorithm, model and privacy into TensorFlow Federated computations that take and return client states.

`tff.learning.templates.LearningProcess` cannot carry client state, so `next` is a plain federated computation:

    initialize  : ( -> server_state@SERVER)
    init_client : (server_state@SERVER -> client_state@SERVER), the state of a client that has not taken part yet
    next        : (server_state@SERVER, client_states@CLIENTS, client_data@CLIENTS, client_params@CLIENTS)
                  -> (server_state@SERVER, client_states@CLIENTS, metrics@SERVER)
    next_of_nobody : (arguments as of `next` -> server_state@SERVER), for a round in which no user was sampled
    adapt       : (arguments as of `next` -> ready_states@CLIENTS), the client states after `Algorithm.adapt`; None for
                  algorithms without `adapt`, whose client states are ready without adaptation
    personalise : (server_state@SERVER, ready_states@CLIENTS) -> weights@CLIENTS
    evaluate    : (server_state@SERVER, ready_states@CLIENTS, client_data@CLIENTS) -> metrics@CLIENTS

Parameters that differ between clients (of the mechanism, hyper-parameters, random seed) are scalars in
`client_params`, so that one compiled computation serves silos with different budgets.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.algorithms.base import Algorithm, GradientEstimator
from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Model
from tff_pdp.privacy.mechanisms.selection import Selector
from tff_pdp.processes.aggregation import (
    UserSum,
    at_server,
    build_plain_aggregation,
    build_plain_start,
    build_user_aggregation,
)
from tff_pdp.processes.client_work import build_adapt_work, build_client_work, initial_weights, plain
from tff_pdp.processes.evaluate import build_evaluate


@dataclasses.dataclass(frozen=True)
class Untraced:
    """A computation that is traced when it is first read from a process, by the function `trace`."""

    trace: Callable[[], _tff.Computation]


class _TracedWhenRead:
    """A field of a process: reading the field traces an `Untraced` computation, once."""

    def __set_name__(self, owner: type, name: str):
        self._place = f"_{name}"

    def __set__(self, process: Any, value: Any) -> None:
        process.__dict__[self._place] = value

    def __get__(self, process: Any, owner: type | None = None) -> Any:
        if process is None:
            # The field has no default.
            raise AttributeError(self._place)
        value = process.__dict__[self._place]
        if isinstance(value, Untraced):
            value = process.__dict__[self._place] = value.trace()
        return value


_NEXT: Any = _TracedWhenRead()
_NEXT_OF_NOBODY: Any = _TracedWhenRead()


@dataclasses.dataclass(frozen=True)
class PersonalizedProcess:
    """The TFF computations of one personalised method; the docstring of the module lists the signatures.

    The computations of a round may be passed as `Untraced`: most of the time that a process takes to build goes into
    tracing them, and evaluation and export do without.
    """

    initialize: _tff.Computation
    init_client: _tff.Computation
    adapt: _tff.Computation | None
    personalise: _tff.Computation
    evaluate: _tff.Computation
    next: _tff.Computation = _NEXT
    next_of_nobody: _tff.Computation = _NEXT_OF_NOBODY


def compose(
    algorithm: Algorithm,
    model: Model,
    *,
    estimator: GradientEstimator,
    selector: Selector | None = None,
    is_weighted: bool = False,
    user_sum: UserSum | None = None,
    model_seed: int = 0,
) -> PersonalizedProcess:
    """Builds the TFF computations in which `algorithm` trains `model`, for any engine.

    The computations of a round are traced when they are first read, unless the server's state depends on them.

    Args:
      algorithm: algorithm of clients and server.
      model: model that clients train.
      estimator: estimator of clients' gradients.
      selector: private selector among the algorithm's candidates; None without candidates.
      is_weighted: whether means of releases are weighted by clients' weights. The weights must be public or already
        private. For plain means, the weights must have a mean of one; for a noised sum, each must be at most one.
      user_sum: noised sum of users' releases, for user-level privacy: all releases of a user are clipped jointly. None
        for the plain means, sums or rows of the algorithm.
      model_seed: seed of the initial weights, which are public.

    Raises:
      ConfigError: the algorithm needs plain gradients, and the estimator clips or noises gradients.
    """
    if (selector is None) != (algorithm.candidates is None):
        raise ValueError(f"{algorithm.name}: pass `selector` if the algorithm has `candidates`, else None")
    if algorithm.needs_plain_gradients and not estimator.is_plain:
        raise ConfigError(
            f"algorithms.{algorithm.name} differentiates gradients, which must have neither clip nor noise: pass an "
            "estimator of plain gradients"
        )

    @_tff.tensorflow_computation
    def init_server():
        return plain(algorithm.init_server(initial_weights(model, model_seed)))

    server_type = init_server.type_signature.result

    @_tff.tensorflow_computation(server_type)
    def broadcast(server):
        return plain(algorithm.broadcast(server))

    broadcast_type = broadcast.type_signature.result

    @_tff.tensorflow_computation(server_type)
    def new_client(server):
        return plain(algorithm.init_client(algorithm.broadcast(server)))

    state_type = new_client.type_signature.result
    data_type = client_data_type(model)
    params_type = client_params_type(algorithm, estimator, is_weighted=is_weighted, user_sum=user_sum)
    is_plain_sum = user_sum is None or not algorithm.released

    @functools.cache
    def trace_work():
        """Traces a client's round, and the aggregation of what clients release."""
        work = build_client_work(algorithm, estimator, selector, is_weighted=is_weighted and user_sum is None)

        @_tff.tensorflow_computation(broadcast_type, state_type, data_type, params_type)
        def client_work(message, state, data, params):
            return work(message, state, data, params)

        released_type = client_work.type_signature.result["released"]
        if user_sum is None or not algorithm.released:
            return client_work, build_plain_aggregation(algorithm, released_type, params_type, is_weighted=is_weighted)
        return client_work, build_user_aggregation(
            algorithm, released_type, params_type, user_sum, is_weighted=is_weighted
        )

    # The state of users' noised sums depends on what users release, the state of plain means and sums does not.
    start_aggregation = build_plain_start() if is_plain_sum else trace_work()[1].initialize

    @_tff.federated_computation
    def initialize():
        return at_server(algorithm=_tff.federated_eval(init_server, _tff.SERVER), aggregation=start_aggregation())

    server_state_type = initialize.type_signature.result

    def told(server_state):
        return _tff.federated_broadcast(_tff.federated_map(broadcast, server_state["algorithm"]))

    @_tff.federated_computation(server_state_type)
    def init_client(server_state):
        return _tff.federated_map(new_client, server_state["algorithm"])

    @functools.cache
    def trace_round():
        """Traces `next` and `next_of_nobody`."""
        client_work, aggregation = trace_work()
        aggregates_type = aggregation.aggregates_type

        @_tff.tensorflow_computation(server_type, aggregates_type)
        def server_work(server, aggregates):
            return plain(algorithm.server_update(server, aggregates))

        @_tff.tensorflow_computation(aggregates_type)
        def release_norms(aggregates):
            # A function of released values, so publishing it costs no further budget.
            return collections.OrderedDict(
                (f"{name}_norm", tf.linalg.global_norm(tf.nest.flatten(aggregates[name])))
                for name in algorithm.released
            )

        @_tff.federated_computation(
            server_state_type, _tff.at_clients(state_type), _tff.at_clients(data_type), _tff.at_clients(params_type)
        )
        def next_round(server_state, client_states, client_data, client_params):
            message = told(server_state)
            result = _tff.federated_map(client_work, (message, client_states, client_data, client_params))
            aggregation_state, aggregates = aggregation.next(
                server_state["aggregation"], result["released"], client_params
            )
            new_server_state = at_server(
                algorithm=_tff.federated_map(server_work, (server_state["algorithm"], aggregates)),
                aggregation=aggregation_state,
            )
            return new_server_state, result["state"], _tff.federated_map(release_norms, aggregates)

        # TFF's worker cannot return clients' results if there are no clients; this computation returns none.
        @_tff.federated_computation(
            server_state_type, _tff.at_clients(state_type), _tff.at_clients(data_type), _tff.at_clients(params_type)
        )
        def next_of_nobody(server_state, client_states, client_data, client_params):
            return next_round(server_state, client_states, client_data, client_params)[0]

        return next_round, next_of_nobody

    adapt, ready_type = None, state_type
    if algorithm.adapt is not None:
        adapt_work = build_adapt_work(algorithm, estimator)

        @_tff.tensorflow_computation(broadcast_type, state_type, data_type, params_type)
        def adapt_one(message, state, data, params):
            return adapt_work(message, state, data, params)

        @_tff.federated_computation(
            server_state_type, _tff.at_clients(state_type), _tff.at_clients(data_type), _tff.at_clients(params_type)
        )
        def adapt(server_state, client_states, client_data, client_params):
            return _tff.federated_map(adapt_one, (told(server_state), client_states, client_data, client_params))

        ready_type = adapt_one.type_signature.result

    @_tff.tensorflow_computation(broadcast_type, ready_type)
    def personalise_one(message, state):
        return algorithm.personalise(message, state)

    @_tff.federated_computation(server_state_type, _tff.at_clients(ready_type))
    def personalise(server_state, client_states):
        return _tff.federated_map(personalise_one, (told(server_state), client_states))

    return PersonalizedProcess(
        initialize=initialize,
        init_client=init_client,
        next=cast(Any, Untraced(lambda: trace_round()[0])),
        next_of_nobody=cast(Any, Untraced(lambda: trace_round()[1])),
        adapt=adapt,
        personalise=personalise,
        evaluate=build_evaluate(algorithm, model, server_state_type, broadcast, ready_type, data_type),
    )


def client_data_type(model: Model) -> Any:
    """Returns the TFF type of one client's data: `<x=float32[?, *input_shape], y=int64[?], num_examples=int32>`.

    Labels y are float32 for a regression. Rows of x and y from index `num_examples` on are padding.
    """
    return _tff.to_type(
        collections.OrderedDict(
            x=_tff.TensorType(np.float32, [None, *model.input_shape]),
            y=_tff.TensorType(model.label_dtype, [None]),
            num_examples=_tff.TensorType(np.int32),
        )
    )


def client_params_type(
    algorithm: Algorithm, estimator: GradientEstimator, *, is_weighted: bool = False, user_sum: UserSum | None = None
) -> Any:
    """Returns the TFF type of one client's parameters in a round.

    Parameters are the mechanism's scalars, hyper-parameters and the round's secret seed. Further parameters are
    `selection_epsilon` for algorithms with candidates (0 for a round without selection), `weight` for weighted clients,
    `clip_norm` for users that clip, and `noise_share` (a standard deviation) for users that add noise.
    """
    fields = collections.OrderedDict(
        mechanism=collections.OrderedDict((name, _tff.TensorType(np.float32)) for name in estimator.mechanism),
        hparams=collections.OrderedDict((name, _tff.TensorType(one.dtype)) for name, one in algorithm.hparams.items()),
        seed=_tff.TensorType(np.int64, [2]),
    )
    if algorithm.candidates is not None:
        fields["selection_epsilon"] = _tff.TensorType(np.float32)
    if is_weighted:
        fields["weight"] = _tff.TensorType(np.float32)
    if user_sum is not None and (is_weighted or algorithm.claims.noise_on_own_support):
        fields["clip_norm"] = _tff.TensorType(np.float32)
    if user_sum is not None and algorithm.claims.noise_on_own_support:
        fields["noise_share"] = _tff.TensorType(np.float32)
    return _tff.to_type(fields)


def client_params_columns(
    algorithm: Algorithm,
    estimator: GradientEstimator,
    *,
    mechanism: Mapping[str, Any],
    hparams: Mapping[str, Any],
    seeds: np.ndarray,
    selection_epsilons: Any = 0.0,
    weights: Any = None,
    **user_values: float,
) -> Any:
    """Returns the parameters of all clients: a structure of type `client_params_type`, with a leading axis of clients.

    Args:
      algorithm: algorithm that names the hyper-parameters.
      estimator: estimator that names the mechanism's scalars.
      mechanism: values by name, each a number for all clients or an array `[clients]`; unknown names are ignored.
      hparams: values by name, each a number for all clients or an array `[clients]`. Missing hyper-parameters have
        their default values; hyper-parameters that the runtime sets must be present.
      seeds: secret seeds, int64 `[clients, 2]`.
      selection_epsilons: epsilons of the round's selection, a number for all clients or an array `[clients]`.
      weights: weights of clients, `[clients]`; None for clients without weights.
      **user_values: `clip_norm` and `noise_share`, if users have these parameters.
    """

    def column(value: Any, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), [len(seeds)]).copy()

    values = {**algorithm.defaults, **hparams}
    columns = collections.OrderedDict(
        mechanism=collections.OrderedDict((name, column(mechanism[name], np.float32)) for name in estimator.mechanism),
        hparams=collections.OrderedDict(
            (name, column(values[name], one.dtype)) for name, one in algorithm.hparams.items()
        ),
        seed=np.asarray(seeds, np.int64),
    )
    if algorithm.candidates is not None:
        columns["selection_epsilon"] = column(selection_epsilons, np.float32)
    if weights is not None:
        columns["weight"] = column(weights, np.float32)
    for name, value in user_values.items():
        columns[name] = column(value, np.float32)
    return columns
