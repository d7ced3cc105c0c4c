"""Checks an algorithm against the contract of all methods of the package, on four small clients of different sizes."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientData, ClientResult, GradientEstimator, map_weights, split
from tff_pdp.algorithms.hyper_parameters import LocalSteps, step_names
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.engines.running import running_engine
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.base import Model
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.privacy.mechanisms.selection import NOTHING, build_selector
from tff_pdp.processes.client_work import build_client_work
from tff_pdp.processes.compose import PersonalizedProcess, client_params_columns, compose

MODEL = build_mlp((2, 2, 1), 3, (4,))
# Numbers of examples and of data rows of each client: two stacks of two clients, with and without padding.
SIZES = (6, 9, 4, 3)
ROWS = (9, 9, 4, 4)
ROUNDS = 3
_DRAWS = 60


def check_algorithm(build: Callable[..., Algorithm], **settings: Any) -> None:
    """Checks declarations, noise, reproducibility, and equal results of clients computed one by one and in stacks.

    Args:
      build: builder of the algorithm, a function in a module that can be imported, as in `algorithms.NAME.kind`.
      settings: arguments of the builder, and hyper-parameters.

    Raises:
      AssertionError: a rule is broken.
      ConfigError: the settings are wrong, or the function cannot be imported by its name.
    """
    given = {"kind": f"{build.__module__}:{build.__qualname__}", **settings}
    algorithm, _ = build_algorithm("outside", given, num_clients=len(SIZES), rounds=ROUNDS, head=MODEL.head)
    check_declarations(algorithm)
    if not algorithm.needs_plain_gradients:
        check_noise(algorithm)
    process = composed(algorithm, MODEL)
    with running_engine("inprocess", "cpu", client_parallelism="loop"):
        looped = run(process, algorithm)
        again = run(process, algorithm)
        require(_are_equal(looped, again), "the same seeds give the same bits")
        padded = run(process, algorithm, data=client_data(padding=math.inf, padding_label=2))
        require(_are_equal(looped, padded), "values of padding do not change the result")
        _check_states(process, algorithm, looped)
    with running_engine("inprocess", "cpu", client_parallelism="vectorized"):
        stacked = run(process, algorithm)
    pairs = zip(leaves(looped), leaves(stacked), strict=True)
    require(
        all(np.allclose(one, other, rtol=1e-3, atol=1e-3 * max(1.0, np.abs(one).max())) for one, other in pairs),
        "clients computed in stacks and one by one have equal results",
    )


def check_declarations(algorithm: Algorithm) -> None:
    """Checks that a client releases nothing undeclared, and computes each charged gradient once.

    Raises:
      AssertionError: a rule is broken.
    """
    require(bool(algorithm.step_hparams), "a hyper-parameter counts the local steps")
    require(set(algorithm.released.values()) <= {"mean", "sum", "rows"}, "each release is a mean, a sum or rows")
    require(
        (algorithm.candidates is None) == (algorithm.selection_rounds == 0),
        "selection_rounds is above 0 if, and only if, there are candidates",
    )
    require(
        bool(step_names(algorithm.hparams, in_adapt=True)) == (algorithm.adapt is not None),
        "some Steps have in_adapt=True if, and only if, there is `adapt`",
    )
    asked = []

    def note(index: Any, scale: Any) -> np.float32:
        asked.extend([int(index)] if scale else [])
        return np.float32(0)

    def grad_fn(weights: Any, data: Any, index: Any, scale: Any, pull: Any = None, trainable: Any = None) -> Any:
        del data, pull
        nothing: Any = tf.numpy_function(note, [index, scale], tf.float32)
        return map_weights(lambda weight: nothing * weight, split(weights, trainable or weights)[0])

    result = run_once(algorithm, grad_fn)
    require(set(result.released) == set(algorithm.released), "a client releases the values in `released`, no others")
    counts = dict.fromkeys(algorithm.step_hparams, 3)
    # Plain gradients have no noise, which would be the same for equal indices.
    asked = list(set(asked)) if algorithm.needs_plain_gradients else asked
    require(
        sorted(asked) == list(range(int(algorithm.num_gradients(counts)))),
        "each gradient that the ledger is charged for is asked for once",
    )


def check_noise(algorithm: Algorithm) -> None:
    """Checks that, under DP-SGD, each released coordinate that depends on data has noise.

    Raises:
      AssertionError: a rule is broken.
    """
    if not algorithm.released:
        return
    release = client_release(algorithm)
    draws = np.stack([release(number) for number in range(_DRAWS)])
    exact = {"noise_multiplier": 0.0, "selection_epsilon": math.inf, "clip_norm": math.inf}
    by_data = np.stack([release(1, client, **exact) for client in range(len(SIZES))])
    # Not by standard deviations, which rounding makes positive where all values are equal.
    depends = np.ptp(by_data, axis=0) > 0
    require(bool(depends.any()), "releases depend on the data")
    require(bool((np.ptp(draws, axis=0)[depends] > 0).all()), "every released coordinate has noise")


def _check_states(process: PersonalizedProcess, algorithm: Algorithm, trained: Any) -> None:
    server, clients = trained
    first = process.initialize()
    before = leaves((first, process.init_client(first)))
    after = leaves((server, clients[0]))
    require(
        [(leaf.dtype, leaf.shape) for leaf in before] == [(leaf.dtype, leaf.shape) for leaf in after],
        "a round keeps types and shapes of states",
    )
    for weights in process.personalise(server, ready(process, algorithm, server, clients)):
        for name, initial in MODEL.init(0).items():
            require(weights[name].shape == initial.shape, "personal weights have the model's shapes")
            require(bool(np.isfinite(weights[name]).all()), "personal weights are finite")
            require(not np.array_equal(weights[name], initial), f"{name} is trained")


def client_data(
    seed: int = 0, rows: Sequence[int] = ROWS, padding: float = 0.0, padding_label: int = 0
) -> list[collections.OrderedDict[str, Any]]:
    """Returns random data of `len(SIZES)` clients: `x` float32 `[rows, 2, 2, 1]`, `y` int64 `[rows]`, 3 classes."""
    rng = np.random.default_rng(seed)
    data = []
    for size, padded in zip(SIZES, rows, strict=True):
        x = np.full([padded, 2, 2, 1], padding, np.float32)
        y = np.full(padded, padding_label, np.int64)
        x[:size] = rng.normal(size=(size, 2, 2, 1))
        y[:size] = rng.integers(0, 3, size, dtype=np.int64)
        data.append(collections.OrderedDict(x=x, y=y, num_examples=np.int32(size)))
    return data


def composed(algorithm: Algorithm, model: Model) -> PersonalizedProcess:
    """Composes an algorithm with `estimator_for` and, if the algorithm has candidates, private selections."""
    selector = build_selector(model, loss_bound=1.0) if algorithm.candidates else None
    return compose(algorithm, model, estimator=estimator_for(algorithm, model), selector=selector)


def estimator_for(algorithm: Algorithm, model: Model) -> GradientEstimator:
    """Builds DP-SGD or, for methods that need them, plain gradients of all of a client's examples."""
    return build_minibatch(model, max(SIZES)) if algorithm.needs_plain_gradients else build_dp_sgd(model)


def client_params(
    algorithm: Algorithm,
    round_number: int,
    noise_multiplier: Any = 1.0,
    clip_norm: Any = 1.0,
    sampling_rate: Any = 0.5,
    selection_epsilon: float = 0.5,
    **hparams: Any,
) -> list[Any]:
    """Returns all clients' parameters of a round; a value is a number for all, or a tuple with a number per client."""
    key = RunKey.from_test_seed(5)
    estimator = estimator_for(algorithm, MODEL)
    columns = client_params_columns(
        algorithm,
        estimator,
        mechanism={
            "clip_norm": clip_norm,
            "noise_multiplier": noise_multiplier,
            "sampling_rate": sampling_rate,
            "expected_batch_size": np.broadcast_to(sampling_rate, len(SIZES)) * SIZES,
        },
        hparams={
            **dict.fromkeys(algorithm.step_hparams, 2),
            "client_index": np.arange(len(SIZES)),
            "budget_epsilon": np.arange(1.0, 1.0 + len(SIZES)),
            **hparams,
        },
        seeds=key.client_seeds(round_number, [f"client {index}" for index in range(len(SIZES))]),
        selection_epsilons=selection_epsilon if round_number <= algorithm.selection_rounds else 0.0,
    )
    return [tf.nest.map_structure(lambda column, i=index: column[i], columns) for index in range(len(SIZES))]


def ready(
    process: PersonalizedProcess, algorithm: Algorithm, server: Any, clients: Any, data: Any = None, **params: Any
) -> Any:
    """Returns clients' states after `adapt`, from which models are made; without `adapt`, the states are unchanged."""
    if process.adapt is None:
        return clients
    data = client_data() if data is None else data
    return process.adapt(server, clients, data, client_params(algorithm, 99, adapt_steps=2, **params))


def run(
    process: PersonalizedProcess,
    algorithm: Algorithm,
    rounds: Any = ROUNDS,
    start: Any = None,
    data: Any = None,
    **params: Any,
) -> tuple[Any, Any]:
    """Runs the rounds 1 to `rounds`, and returns the server's state and the clients' states.

    If `start` has states (server, clients) to continue from, `rounds` is the pair (first round, last round).
    """
    server, clients = start or (process.initialize(), None)
    first = 1
    if clients is None:
        clients = [process.init_client(server)] * len(SIZES)
    else:
        first, rounds = rounds
    data = client_data() if data is None else data
    for number in range(first, rounds + 1):
        server, clients, _ = process.next(server, clients, data, client_params(algorithm, number, **params))
    return server, clients


def run_once(algorithm: Algorithm, grad_fn: Any = None) -> ClientResult:
    """Runs one client's round, of three steps with a bound of five, and the server's update, outside of TFF.

    Returns:
      The client's result.
    """

    def nothing(weights: Any, data: Any, index: Any, scale: Any, pull: Any = None, trainable: Any = None) -> Any:
        return split(map_weights(tf.zeros_like, weights), trainable or weights)[0]

    zeros: Any = nothing
    initial = collections.OrderedDict((name, tf.constant(array)) for name, array in MODEL.init(0).items())
    server = algorithm.init_server(initial)
    message = algorithm.broadcast(server)
    data = ClientData(**tf.nest.map_structure(tf.constant, client_data()[0]))
    hparams = dict(tf.nest.map_structure(tf.constant, client_params(algorithm, 1)[0]["hparams"]))
    hparams |= dict.fromkeys(algorithm.step_hparams, LocalSteps(tf.constant(3), tf.constant(5)))
    if algorithm.candidates is not None:
        algorithm.candidates(message)
    hparams["selected"] = tf.constant(NOTHING)
    result = algorithm.client_update(message, algorithm.init_client(message), data, grad_fn or zeros, hparams)
    state = result.state
    if algorithm.adapt is not None:
        once = LocalSteps(tf.constant(1), tf.constant(1))
        steps = dict.fromkeys(step_names(algorithm.hparams, in_adapt=True), once)
        state = algorithm.adapt(message, state, data, zeros, {**hparams, **steps})
    algorithm.personalise(message, state)
    algorithm.server_update(server, _aggregates(algorithm, result.released, hparams))
    return result


def _aggregates(algorithm: Algorithm, released: Mapping[str, Any], hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the server's aggregates of a round in which all clients release the same values."""

    def rows(value):
        stacked = map_weights(lambda row: tf.stack([row] * (algorithm.num_clients or 0)), value)
        return {"rows": stacked, "present": tf.ones([algorithm.num_clients])}

    public = algorithm.public_values(hparams) if algorithm.public_values else {}
    names = [name for name, kind in algorithm.released.items() if kind == "rows"]
    return {**released, **{name: rows(released[name]) for name in names}, **public}


def client_release(algorithm: Algorithm) -> Callable[..., np.ndarray]:
    """Builds a function `(round number, client, **mechanism)` that returns a client's releases of one DP-SGD step."""
    initial = collections.OrderedDict((name, tf.constant(array)) for name, array in MODEL.init(0).items())
    message = algorithm.broadcast(algorithm.init_server(initial))
    selector = build_selector(MODEL, loss_bound=1.0) if algorithm.candidates else None
    work = build_client_work(algorithm, build_dp_sgd(MODEL), selector)

    @tf.function(reduce_retracing=True)
    def release(data, params):
        return work(message, algorithm.init_client(message), data, params)["released"]

    def draw(number, client=0, **mechanism):
        data = tf.nest.map_structure(tf.constant, client_data(rows=[max(SIZES)] * len(SIZES))[client])
        params = client_params(algorithm, number, **dict.fromkeys(algorithm.step_hparams, 1), **mechanism)[0]
        # Clients select in the first rounds only; here each number stands for a first round.
        if algorithm.candidates:
            params["selection_epsilon"] = np.float32(mechanism.get("selection_epsilon", 0.5))
        released = release(data, tf.nest.map_structure(tf.constant, params))
        return np.concatenate([leaf.ravel() for leaf in leaves(released)])

    return draw


def leaves(value: Any) -> list[np.ndarray]:
    """Returns the arrays of a nested value, in the order of `tf.nest.flatten`."""
    return [np.asarray(leaf) for leaf in tf.nest.flatten(value)]


def require(holds: bool, rule: str) -> None:
    """Raises an `AssertionError` that names a rule, unless the rule holds."""
    if not holds:
        raise AssertionError(f"Rule broken: {rule}.")


def _are_equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(first, second) for first, second in zip(leaves(one), leaves(other), strict=True))
