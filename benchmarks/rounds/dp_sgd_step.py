"""Measures what DP adds to the time of a local step: a step of DP-SGD, and the same step without clip and noise.

Both steps use the same weights, client and Poisson batch; `python -m benchmarks.rounds.dp_sgd_step`.
"""

import argparse
import collections
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.machine import RESULTS
from benchmarks.rounds.run import write_rows
from tff_pdp.algorithms.base import ClientData
from tff_pdp.models.base import Model
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_linear, build_mlp
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd

OUTPUT = RESULTS / "dp_sgd_step.json"
NUM_EXAMPLES = 640
BATCH_SIZE = 64
RATE = 0.1
NUM_CLASSES = 62
MODELS: dict[str, Callable[[], Model]] = {
    "linear": lambda: build_linear((784,), NUM_CLASSES),
    "mlp": lambda: build_mlp((784,), NUM_CLASSES, (200,)),
    "cnn": lambda: build_cnn((28, 28, 1), NUM_CLASSES),
}


def measure(name: str, repetitions: int) -> dict[str, Any]:
    """Times both steps of one model alternately; returns a row of the results."""
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    data = ClientData(
        x=tf.constant(rng.uniform(size=(NUM_EXAMPLES, *model.input_shape)), tf.float32),
        y=tf.constant(rng.integers(NUM_CLASSES, size=NUM_EXAMPLES)),
        num_examples=tf.constant(NUM_EXAMPLES),
    )
    weights = collections.OrderedDict((key, tf.constant(value)) for key, value in model.init(0).items())
    steps = {"plain": _plain_step(model), "dp": _dp_step(model)}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for repetition in range(-2, repetitions):
        seed = tf.constant([[1, repetition]], tf.int64)
        for kind, step in steps.items():
            started = time.perf_counter()
            tf.nest.map_structure(np.asarray, step(weights, data, seed))
            if repetition >= 0:
                seconds[kind].append(time.perf_counter() - started)
    plain, private = (statistics.median(seconds[kind]) for kind in ("plain", "dp"))
    return {"model": name, "plain_s": plain, "dp_s": private, "ratio": private / plain, "repetitions": repetitions}


_MECHANISM = {
    "clip_norm": 1.0,
    "noise_multiplier": 1.0,
    "sampling_rate": BATCH_SIZE / NUM_EXAMPLES,
    "expected_batch_size": float(BATCH_SIZE),
}


def _draws(model: Model, seed: tf.Tensor) -> Any:
    mechanism = {name: tf.constant([value]) for name, value in _MECHANISM.items()}
    one = tf.constant([1])
    draws = build_dp_sgd(model).draw(mechanism, one * NUM_EXAMPLES, tf.constant(NUM_EXAMPLES), one, seed)
    return tf.nest.map_structure(lambda leaf: leaf[0], draws)


def _dp_step(model: Model) -> Callable[..., Any]:
    estimator = build_dp_sgd(model)
    mechanism = {name: tf.constant(value) for name, value in _MECHANISM.items()}

    @tf.function
    def step(weights: Any, data: ClientData, seed: tf.Tensor) -> Any:
        gradient = estimator.gradient(
            mechanism, _draws(model, seed), weights, data, tf.constant(0), tf.constant(RATE), None, None
        )
        return tf.nest.map_structure(tf.subtract, weights, gradient)

    return step


def _plain_step(model: Model) -> Callable[..., Any]:
    @tf.function
    def step(weights: Any, data: ClientData, seed: tf.Tensor) -> Any:
        batch = _draws(model, seed).batches.indices[0]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(model.loss(weights, tf.gather(data.x, batch), tf.gather(data.y, batch)))
            loss *= RATE / BATCH_SIZE
        return tf.nest.map_structure(tf.subtract, weights, tape.gradient(loss, weights))

    return step


def main() -> None:
    """Measures all models and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=100, metavar="N", help="recorded steps; default 100")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, metavar="FILE", help=f"default {OUTPUT}")
    options = parser.parse_args()
    rows = [measure(name, options.repetitions) for name in MODELS]
    write_rows(rows, options.output)
    for row in rows:
        print(f"{row['model']:<8} {1e3 * row['plain_s']:8.2f} ms {1e3 * row['dp_s']:8.2f} ms  {row['ratio']:.2f} times")


if __name__ == "__main__":
    main()
