"""What `tff-pdp doctor` shows: versions, devices, and whether each engine computes what the reference computes."""

import importlib.metadata
import platform
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.errors import EngineError, UserError
from tff_pdp.runtime import devices
from tff_pdp.runtime.engines import running_engine

DISTRIBUTIONS = ("tff-pdp", "tensorflow", "tensorflow-federated", "tensorflow-privacy", "dp-accounting")
TOLERANCE = 1e-5
_NUM_CLIENTS = 4
_NOISE_STDDEV = 0.1


def examine() -> tuple[dict[str, Any], str]:
    """Looks at the installation and tests the engines.

    The test is a round of FedAvg by `tff.learning` with user-level DP on each device: once without noise, compared with
    TFF's own C++ worker, and once with noise, whose size is checked.

    Returns:
      Everything found, with `healthy` true if all tests passed; and the same as text.
    """
    versions = {"python": platform.python_version(), **{name: _version(name) for name in DISTRIBUTIONS}}
    found = devices.gpus()
    targets = [("native", "cpu"), ("inprocess", "cpu"), *(("inprocess", f"gpu:{n}") for n in range(len(found)))]
    reference: Any = None
    tests = []
    for engine, device in targets:
        result: dict[str, Any] = {"engine": engine, "device": device}
        try:
            weights, noise = _run(engine, device)
            reference = weights if engine == "native" else reference
            if reference is None:
                raise EngineError("there is nothing to compare with: the native engine has failed")
            result["difference"] = float(np.max(np.abs(weights - reference)))
            result["noise_stddev"] = float(np.std(noise))
            # 7 standard errors of a standard deviation estimated from this many draws.
            noise_is_right = abs(result["noise_stddev"] / _NOISE_STDDEV - 1) < 7 / np.sqrt(2 * noise.size)
            result["passed"] = bool(result["difference"] <= TOLERANCE and noise_is_right)
        except (UserError, tf.errors.OpError) as error:
            result.update(passed=False, error=str(error))
        tests.append(result)
    content = {
        "versions": versions,
        "gpus": found,
        "tests": tests,
        "healthy": all(test["passed"] for test in tests),
    }
    return content, _text(content)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _run(engine: str, device: str) -> tuple[np.ndarray, np.ndarray]:
    """The weights after a round without noise, and the noise of one with it."""
    with running_engine(engine, device):
        weights = _one_round(0.0)
        return weights, _one_round(_NOISE_STDDEV * _NUM_CLIENTS) - weights


def _one_round(noise_multiplier: float) -> np.ndarray:
    process = _tff.build_unweighted_fed_avg(
        _model(),
        client_optimizer_fn=_tff.build_sgdm(0.1),
        model_aggregator=_tff.DifferentiallyPrivateFactory.gaussian_fixed(
            noise_multiplier=noise_multiplier, clients_per_round=_NUM_CLIENTS, clip=1.0
        ),
    )
    state = process.next(process.initialize(), [_dataset(seed) for seed in range(_NUM_CLIENTS)]).state
    return np.concatenate([np.asarray(weight).ravel() for weight in process.get_model_weights(state).trainable])


def _model() -> Any:
    """Softmax regression from 64 features to 10 classes."""

    @tf.function
    def predict(weights: Any, x: Any, training: bool) -> Any:
        del training
        return x @ weights[0][0] + weights[0][1]

    @tf.function
    def loss(output: Any, label: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=output))

    return _tff.FunctionalModel(
        initial_weights=((np.zeros((64, 10), np.float32), np.zeros(10, np.float32)), ()),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=(tf.TensorSpec([None, 64], tf.float32), tf.TensorSpec([None], tf.int32)),
    )


def _dataset(seed: int) -> tf.data.Dataset:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(20, 64)).astype(np.float32), rng.integers(10, size=20, dtype=np.int32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(10)


def _text(content: dict[str, Any]) -> str:
    lines = [f"{name:<22} {version}" for name, version in content["versions"].items()]
    gpus = content["gpus"] or ["none that TensorFlow can use"]
    lines += [f"{'gpu:' + str(number) if content['gpus'] else 'gpu':<22} {name}" for number, name in enumerate(gpus)]
    lines.append("")
    for test in content["tests"]:
        where = f"{test['engine']} on {test['device']}"
        if "error" in test:
            lines.append(f"{where:<22} FAILED: {test['error']}")
        else:
            verdict = "ok" if test["passed"] else "FAILED"
            lines.append(
                f"{where:<22} {verdict}: a DP FedAvg round differs by {test['difference']:.1e} from native's; its "
                f"noise has standard deviation {test['noise_stddev']:.4f}, {_NOISE_STDDEV} expected"
            )
    return "\n".join(lines)
