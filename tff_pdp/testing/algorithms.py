"""Checks an algorithm against the contract that all methods of the package meet, on small clients of four sizes."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientData, ClientResult, map_weights, split
from tff_pdp.algorithms.hyper_parameters import LocalSteps, step_names
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
# Examples of each client, and rows of its data: two stacks of two clients, with padding and without.
SIZES = (6, 9, 4, 3)
ROWS = (9, 9, 4, 4)
ROUNDS = 3
_DRAWS = 60


def check_algorithm(build: Callable[..., Algorithm], **settings: Any) -> None:
    """Checks an algorithm: declared releases alone, each gradient once, noise everywhere, equal results on all engines.

    Args:
      build: as in `algorithms.NAME.kind`: a function of a module that Python can import.
      settings: arguments of the builder, and hyper-parameters.

    Raises:
      AssertionError: a rule is broken.
      ConfigError: the settings are wrong, or the function cannot be imported by its name.
    """
    given = {"kind": f"{build.__module__}:{build.__qualname__}", **settings}
    algorithm, _ = build_algorithm("outside", given, num_clients=len(SIZES), rounds=ROUNDS, head=MODEL.head)
    check_declarations(algorithm)
    check_noise(algorithm)
    process = compose_with_dp_sgd(algorithm, MODEL)
    with running_engine("inprocess", "cpu", client_parallelism="loop"):
        looped = run(process, algorithm)
        again = run(process, algorithm)
        require(_are_equal(looped, again), "the same seeds give the same bits")
        padded = run(process, algorithm, data=client_data(padding=math.inf, padding_label=2))
        require(_are_equal(looped, padded), "padding may hold anything")
        _check_states(process, algorithm, looped)
    with running_engine("inprocess", "cpu", client_parallelism="vectorized"):
        stacked = run(process, algorithm)
    pairs = zip(leaves(looped), leaves(stacked), strict=True)
    require(
        all(np.allclose(one, other, rtol=1e-3, atol=1e-3 * max(1.0, np.abs(one).max())) for one, other in pairs),
        "clients in stacks get what clients one by one get",
    )


def check_declarations(algorithm: Algorithm) -> None:
    """Checks that nothing undeclared leaves a client, and that each gradient is asked for once.

    Raises:
      AssertionError: a rule is broken.
    """
    require(bool(algorithm.step_hparams), "a hyper-parameter counts the local steps")
    require(set(algorithm.released.values()) <= {"mean", "sum", "rows"}, "released are means, sums and rows")
    require(
        (algorithm.candidates is None) == (algorithm.selection_rounds == 0), "who has candidates selects in some rounds"
    )
    require(
        bool(step_names(algorithm.hparams, in_adapt=True)) == (algorithm.adapt is not None),
        "an adaptation has steps of its own",
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
    require(set(result.released) == set(algorithm.released), "what leaves a client is what is declared")
    counts = dict.fromkeys(algorithm.step_hparams, 3)
    require(
        sorted(asked) == list(range(int(algorithm.num_gradients(counts)))),
        "each gradient that is charged for is asked for once",
    )


def check_noise(algorithm: Algorithm) -> None:
    """Checks that each released coordinate that depends on data has noise, under DP-SGD.

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
    require(bool(depends.any()), "what is released depends on the data")
    require(bool((np.ptp(draws, axis=0)[depends] > 0).all()), "no coordinate of a release is without noise")


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
    """Makes up examples of `SIZES` clients, float32 `x [rows, 2, 2, 1]` and int64 `y [rows]` in three classes."""
    rng = np.random.default_rng(seed)
    data = []
    for size, padded in zip(SIZES, rows, strict=True):
        x = np.full([padded, 2, 2, 1], padding, np.float32)
        y = np.full(padded, padding_label, np.int64)
        x[:size] = rng.normal(size=(size, 2, 2, 1))
        y[:size] = rng.integers(0, 3, size, dtype=np.int64)
        data.append(collections.OrderedDict(x=x, y=y, num_examples=np.int32(size)))
    return data


def compose_with_dp_sgd(algorithm: Algorithm, model: Model) -> PersonalizedProcess:
    """Composes an algorithm with DP-SGD, and with private selections where there are candidates."""
    selector = build_selector(model, loss_bound=1.0) if algorithm.candidates else None
    return compose(algorithm, model, estimator=build_dp_sgd(model), selector=selector)


def client_params(
    algorithm: Algorithm,
    round_number: int,
    noise_multiplier: Any = 1.0,
    clip_norm: Any = 1.0,
    sampling_rate: Any = 0.5,
    selection_epsilon: float = 0.5,
    **hparams: Any,
) -> list[Any]:
    """Makes clients' parameters of a round; a value is for all clients, or a tuple with one for each."""
    key = RunKey.from_test_seed(5)
    estimator = build_dp_sgd(MODEL)
    columns = client_params_columns(
        algorithm,
        estimator,
        mechanism={
            "clip_norm": clip_norm,
            "noise_multiplier": noise_multiplier,
            "sampling_rate": sampling_rate,
            "expected_batch_size": np.broadcast_to(sampling_rate, len(SIZES)) * SIZES,
        },
        hparams={**dict.fromkeys(algorithm.step_hparams, 2), "client_index": np.arange(len(SIZES)), **hparams},
        seeds=np.stack([key.client_seed(round_number, f"client {index}") for index in range(len(SIZES))]),
        selection_epsilons=selection_epsilon if round_number <= algorithm.selection_rounds else 0.0,
    )
    return [tf.nest.map_structure(lambda column, i=index: column[i], columns) for index in range(len(SIZES))]


def ready(
    process: PersonalizedProcess, algorithm: Algorithm, server: Any, clients: Any, data: Any = None, **params: Any
) -> Any:
    """Adapts clients' states, where the method adapts, to the states that their models are used with."""
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
    """Runs rounds and returns the states of server and clients; after `start`, rounds are the first and the last."""
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
    """Runs one client's round, of three steps in a stack of five, and the server's, outside of any computation.

    Returns:
      The `ClientResult`.
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
    """What the server has of a round in which all clients release the same."""

    def rows(value):
        stacked = map_weights(lambda row: tf.stack([row] * (algorithm.num_clients or 0)), value)
        return {"rows": stacked, "present": tf.ones([algorithm.num_clients])}

    public = algorithm.public_values(hparams) if algorithm.public_values else {}
    names = [name for name, kind in algorithm.released.items() if kind == "rows"]
    return {**released, **{name: rows(released[name]) for name in names}, **public}


def client_release(algorithm: Algorithm) -> Callable[..., np.ndarray]:
    """Makes a function of what one client releases in a round of one step, with the composed process's mechanism."""
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
        # Selections are made in the first rounds only; here each number stands for a first round.
        if algorithm.candidates:
            params["selection_epsilon"] = np.float32(mechanism.get("selection_epsilon", 0.5))
        released = release(data, tf.nest.map_structure(tf.constant, params))
        return np.concatenate([leaf.ravel() for leaf in leaves(released)])

    return draw


def leaves(value: Any) -> list[np.ndarray]:
    """Returns the arrays of a nested value, in TensorFlow's order."""
    return [np.asarray(leaf) for leaf in tf.nest.flatten(value)]


def require(holds: bool, rule: str) -> None:
    """Raises an `AssertionError` that names a rule, unless the rule holds."""
    if not holds:
        raise AssertionError(f"Rule broken: {rule}.")


def _are_equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(first, second) for first, second in zip(leaves(one), leaves(other), strict=True))
