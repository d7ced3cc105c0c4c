"""Runs `tff-pdp doctor`: shows versions and devices, and tests each engine against the reference."""

import collections
import functools
import platform
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.algorithms.whole_models.mr_mtl import build_mr_mtl
from tff_pdp.engines import devices
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.running import running_engine
from tff_pdp.errors import EngineError, UserError
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.dense import build_linear
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.processes.compose import (
    PersonalizedProcess,
    client_data_type,
    client_params_columns,
    client_params_type,
    compose,
)
from tff_pdp.settings import ClientParallelism

DISTRIBUTIONS = ("tff-pdp", "tensorflow", "tensorflow-federated", "tensorflow-privacy", "dp-accounting")
_NUM_FEATURES = 64
_NUM_CLASSES = 10
_NUM_CLIENTS = 4
_NOISE_STDDEV = 0.1
# The largest difference of two right results. A step of a round sums over features, over a client's 20 examples and,
# for a norm, over all weights; it takes five exponentials, logarithms, sines and cosines in sequence, which count as
# eight roundings each, and some twenty more operations. Weights start from zero and stay within 0.06 for three steps:
# one is 0.03 / 10 of a sum that is clipped to 1, with noise of up to five standard deviations of 1.
_ROUNDINGS_OF_A_STEP = _NUM_FEATURES + 20 + (_NUM_FEATURES + 1) * _NUM_CLASSES + 5 * 8 + 20
TOLERANCE = 2 * 3 * _ROUNDINGS_OF_A_STEP * 2.0**-24 * 0.06
_SHOWN_CHARACTERS = 400


def examine() -> tuple[dict[str, Any], str]:
    """Lists versions and devices, and tests the engines.

    Two rounds are computed on each device and compared with the results of TFF's own C++ worker, the reference:

    - `dp_fed_avg`: FedAvg by `tff.learning` with user-level DP, once without noise, to compare weights, and once with
      noise, to check the noise's size. Clients have `tf.data` data sets, and are always computed one by one.
    - `dp_sgd`: MR-MTL with DP-SGD in every client, from known seeds, with clients one by one and stacked.

    Returns:
      All findings as plain data, with `healthy` true if all tests passed; and all findings as text. Every test has
      `round`, `engine`, `device`, `client_parallelism` (None on the native engine), `passed`, `difference` (the largest
      difference from the reference), `noise_stddev` (in `dp_fed_avg`) and `error`; a value that does not apply is None.
    """
    installed = {name: _tff.installed_version(name) or "absent" for name in DISTRIBUTIONS}
    versions = {"python": platform.python_version(), **installed}
    found = devices.gpus()
    references: dict[str, np.ndarray] = {}
    tests = [_test(*case, references) for case in _cases(["cpu", *(f"gpu:{number}" for number in range(len(found)))])]
    content = {"versions": versions, "gpus": found, "tests": tests, "healthy": all(test["passed"] for test in tests)}
    return content, _text(content)


def _cases(places: list[str]) -> Iterator[tuple[str, str, str, ClientParallelism | None]]:
    """Yields round, engine, device and client parallelism of each test, the reference first."""
    for name in _ROUNDS:
        yield name, "native", "cpu", None
    for device in places:
        yield "dp_fed_avg", "inprocess", device, "loop"
        yield "dp_sgd", "inprocess", device, "loop"
        yield "dp_sgd", "inprocess", device, "vectorized"


def _test(
    name: str, engine: str, device: str, parallelism: ClientParallelism | None, references: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Runs one test; a result that passes on the native engine is the reference of later tests."""
    result: dict[str, Any] = {"round": name, "engine": engine, "device": device, "client_parallelism": parallelism}
    result.update(passed=False, difference=None, noise_stddev=None, error=None)
    try:
        values, noise = _run(name, engine, device, parallelism)
        reference = values if engine == "native" else references.get(name)
        if reference is None:
            raise EngineError("there is no reference to compare with, because the native engine has failed")
        _compare(result, values, reference, noise)
    except (UserError, tf.errors.OpError, grpc.RpcError) as error:
        details = error.details() if isinstance(error, grpc.Call) else None
        return {**result, "error": details or str(error) or type(error).__name__}
    if engine == "native":
        references[name] = values
    return {**result, "passed": True}


def _run(
    name: str, engine: str, device: str, parallelism: ClientParallelism | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the result of a round, and the noise if it is known separately, or None."""
    choices: dict[str, str] = {}
    options = {} if parallelism is None else {"client_parallelism": parallelism, "choices": choices}
    with running_engine(engine, device, **options):
        outcome = _ROUNDS[name][1]()
    if parallelism == "vectorized" and choices:
        raise EngineError("clients were computed one by one, not as a stack")
    return outcome


def _compare(result: dict[str, Any], values: np.ndarray, reference: np.ndarray, noise: np.ndarray | None) -> None:
    """Enters difference and noise into the result.

    Raises:
      EngineError: the values are not finite, differ too much from the reference, or have noise of another size.
    """
    if not np.isfinite(values).all() or (noise is not None and not np.isfinite(noise).all()):
        raise EngineError("the result is not finite")
    result["difference"] = float(np.max(np.abs(values - reference)))
    if noise is not None:
        result["noise_stddev"] = float(np.std(noise))
    if result["difference"] > TOLERANCE:
        raise EngineError(f"differs by {result['difference']:.1e} from native; allowed: {TOLERANCE:.0e}")
    # 7 standard errors of a standard deviation estimated from this many draws.
    if noise is not None and abs(result["noise_stddev"] / _NOISE_STDDEV - 1) >= 7 / np.sqrt(2 * noise.size):
        raise EngineError(f"the noise's deviation is {result['noise_stddev']:.4f}; expected: {_NOISE_STDDEV}")


# A DP FedAvg round
# -----------------


def _dp_fed_avg() -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights after a round without noise, and the noise of a round with it."""
    weights, noised = _fed_avg_round(0.0), _fed_avg_round(_NOISE_STDDEV * _NUM_CLIENTS)
    with np.errstate(invalid="ignore"):  # Infinite on a broken engine, which `_compare` refuses.
        return weights, noised - weights


def _fed_avg_round(noise_multiplier: float) -> np.ndarray:
    process = _fed_avg(noise_multiplier)
    state = process.next(process.initialize(), [_dataset(seed) for seed in range(_NUM_CLIENTS)]).state
    return _flat(process.get_model_weights(state).trainable)


@functools.cache
def _fed_avg(noise_multiplier: float) -> Any:
    return _tff.build_unweighted_fed_avg(
        _model(),
        client_optimizer_fn=_tff.build_sgdm(0.1),
        model_aggregator=_tff.DifferentiallyPrivateFactory.gaussian_fixed(
            noise_multiplier=noise_multiplier, clients_per_round=_NUM_CLIENTS, clip=1.0
        ),
    )


def _model() -> Any:

    @tf.function
    def predict(weights: Any, x: Any, training: bool) -> Any:
        del training
        return x @ weights[0][0] + weights[0][1]

    @tf.function
    def loss(output: Any, label: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=output))

    return _tff.FunctionalModel(
        initial_weights=((np.zeros((_NUM_FEATURES, _NUM_CLASSES), np.float32), np.zeros(_NUM_CLASSES, np.float32)), ()),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=(tf.TensorSpec([None, _NUM_FEATURES], tf.float32), tf.TensorSpec([None], tf.int32)),
    )


def _dataset(seed: int) -> tf.data.Dataset:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(20, _NUM_FEATURES)).astype(np.float32)
    y = rng.integers(_NUM_CLASSES, size=20, dtype=np.int32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(10)


# A round of a composed process with DP-SGD in every client
# ---------------------------------------------------------


def _dp_sgd() -> tuple[np.ndarray, None]:
    """Returns all results of a round: the server's state, the clients' and the metrics."""
    process, data, params = _mr_mtl()
    server = process.initialize()
    clients = [process.init_client(server)] * _NUM_CLIENTS
    server, clients, metrics = process.next(server, clients, data, params)
    return _flat((server, list(clients), metrics)), None


@functools.cache
def _mr_mtl() -> tuple[PersonalizedProcess, list[Any], list[Any]]:
    """Returns the process, and data and parameters of clients that differ in size, budget and number of steps."""
    algorithm, model = build_mr_mtl(), build_linear((_NUM_FEATURES,), _NUM_CLASSES)
    estimator = build_dp_sgd(model)
    sizes = np.array([20, 17, 12, 20])
    rates = np.array([0.5, 0.75, 1.0, 0.25], np.float32)
    rng = np.random.default_rng(0)
    key = RunKey.from_test_seed(0)
    data = collections.OrderedDict(
        x=rng.normal(size=(_NUM_CLIENTS, 20, _NUM_FEATURES)).astype(np.float32),
        y=rng.integers(_NUM_CLASSES, size=(_NUM_CLIENTS, 20)),
        num_examples=sizes.astype(np.int32),
    )
    mechanism = {
        "clip_norm": [1.0, 2.0, 0.5, 1.0],
        "noise_multiplier": [1.0, 0.5, 2.0, 0.0],
        "sampling_rate": rates,
        "expected_batch_size": rates * sizes.astype(np.float32),
    }
    hparams = {
        # Small steps keep differences of rounding far below the tolerance.
        "learning_rate": 0.03,
        "local_steps": [2, 3, 1, 2],
        "prox_weight": 1.0,
    }
    params = client_params_columns(
        algorithm,
        estimator,
        mechanism=mechanism,
        hparams=hparams,
        seeds=np.stack([key.client_seed(1, str(client)) for client in range(_NUM_CLIENTS)]),
    )
    return (
        compose(algorithm, model, estimator=estimator),
        list(ClientValues.from_columns(client_data_type(model), data)),
        list(ClientValues.from_columns(client_params_type(algorithm, estimator), params)),
    )


# Title, and computation.
_ROUNDS: dict[str, tuple[str, Callable[[], tuple[np.ndarray, np.ndarray | None]]]] = {
    "dp_fed_avg": ("DP FedAvg of tff.learning", _dp_fed_avg),
    "dp_sgd": ("MR-MTL with DP-SGD", _dp_sgd),
}


def _flat(structure: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in tf.nest.flatten(structure)])


def _text(content: dict[str, Any]) -> str:
    lines = [f"{name:<22} {version}" for name, version in content["versions"].items()]
    gpus = content["gpus"] or ["none that TensorFlow can use"]
    lines += [f"{'gpu:' + str(number) if content['gpus'] else 'gpu':<22} {name}" for number, name in enumerate(gpus)]
    return "\n".join([*lines, "", *map(_line, content["tests"])])


def _line(test: dict[str, Any]) -> str:
    where = ", ".join(filter(None, [f"{test['engine']} on {test['device']}", test["client_parallelism"]]))
    title, _ = _ROUNDS[test["round"]]
    if not test["passed"]:
        return f"{where:<30} FAILED: {title}: {_shortened(test['error'])}"
    found = "is the reference" if test["engine"] == "native" else f"differs by {test['difference']:.1e} from native"
    if test["noise_stddev"] is not None:
        found += f"; its noise is {test['noise_stddev']:.4f}, {_NOISE_STDDEV} expected"
    return f"{where:<30} ok: {title} {found}"


def _shortened(reason: str) -> str:
    """Shortens a reason to one line: TensorFlow gives it at the end of pages, engines at the beginning."""
    line = " ".join(reason.split())
    half = _SHOWN_CHARACTERS // 2
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:half]} ... {line[-half:]}"
