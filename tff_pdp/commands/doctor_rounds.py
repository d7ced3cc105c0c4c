"""Builds the rounds that `tff-pdp doctor` computes on each engine, and states how far two right results may differ."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.algorithms.whole_models.mr_mtl import build_mr_mtl
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.base import Model
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_linear
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.processes.compose import (
    PersonalizedProcess,
    client_data_type,
    client_params_columns,
    client_params_type,
    compose,
)

NOISE_STDDEV = 0.1
_NUM_FEATURES = 64
_NUM_CLASSES = 10
_NUM_CLIENTS = 4
_IMAGE_SHAPE = (8, 8, 2)
_CHANNELS = (4, 8)


def _tolerance(num_sums: int) -> float:
    """Returns the largest difference of two right results.

    A step of a round sums over a layer's inputs, over a client's 20 examples and, for a norm, over all weights. A step
    takes five exponentials, logarithms, sines and cosines in sequence, which count as eight roundings each, and some
    twenty more operations. Weights change by at most 0.06 in three steps: one step is 0.03 / 10 of a sum that is
    clipped to 1, with noise of up to five standard deviations of 1.

    Args:
      num_sums: number of roundings in the sums of a step over inputs, positions and weights.
    """
    return 2 * 3 * (num_sums + 20 + 5 * 8 + 20) * 2.0**-24 * 0.06


TOLERANCE = _tolerance(_NUM_FEATURES + (_NUM_FEATURES + 1) * _NUM_CLASSES)
# Inputs of both convolutions and of the dense layer, positions whose gradients of a kernel are added, all weights; as
# much again for the way back. A unit of ReLU that is zero up to rounding may differ by more; for this data none is.
_CONVOLUTION_SUMS = 2 * (18 + 36 + 32 + 36 + 16) + (76 + 296 + 330)
CONVOLUTION_TOLERANCE = _tolerance(_CONVOLUTION_SUMS)


@dataclasses.dataclass(frozen=True)
class Round:
    """A round whose results engines are compared by.

    Attributes:
      title: the round in words.
      start: computes the state before the round.
      run: computes the round from that state; returns all results as one float64 array.
      noised: computes the same round with noise of deviation `NOISE_STDDEV`; None if noise is a part of the round.
      tolerance: largest difference of two right results, in any entry.
      is_repeatable: whether the round has the same bits each time, with deterministic operations. TFF's own noise comes
        from operations without a seed, which deterministic operations refuse.
      reference: what computes the reference: the engine's name and, for ours, how the engine computes clients.
    """

    title: str
    start: Callable[[], Any]
    run: Callable[[Any], np.ndarray]
    noised: Callable[[], np.ndarray] | None = None
    tolerance: float = TOLERANCE
    is_repeatable: bool = True
    reference: tuple[str, str | None] = ("native", None)


# A DP FedAvg round
# -----------------


def _fed_avg_round(noise_multiplier: float, state: Any) -> np.ndarray:
    process = _fed_avg(noise_multiplier)
    state = process.next(state, [_dataset(seed) for seed in range(_NUM_CLIENTS)]).state
    return _flat(process.get_model_weights(state).trainable)


def _noised_fed_avg() -> np.ndarray:
    noise_multiplier = NOISE_STDDEV * _NUM_CLIENTS
    return _fed_avg_round(noise_multiplier, _fed_avg(noise_multiplier).initialize())


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


def _start(model_name: str) -> Any:
    process, _, _ = _mr_mtl(model_name)
    server = process.initialize()
    return server, [process.init_client(server)] * _NUM_CLIENTS


def _next(model_name: str, start: Any) -> np.ndarray:
    """Returns all results of a round: the server's state, the clients' and the metrics."""
    process, data, params = _mr_mtl(model_name)
    server, clients, metrics = process.next(*start, data, params)
    return _flat((server, list(clients), metrics))


def _build(model_name: str) -> Model:
    if model_name == "linear":
        return build_linear((_NUM_FEATURES,), _NUM_CLASSES)
    return build_cnn(_IMAGE_SHAPE, _NUM_CLASSES, _CHANNELS, hidden_units=0)


@functools.cache
def _mr_mtl(model_name: str) -> tuple[PersonalizedProcess, list[Any], list[Any]]:
    """Returns the process, and data and parameters of clients that differ in size, budget and number of steps."""
    algorithm, model = build_mr_mtl(), _build(model_name)
    estimator = build_dp_sgd(model)
    sizes = np.array([20, 17, 12, 20])
    rates = np.array([0.5, 0.75, 1.0, 0.25], np.float32)
    rng = np.random.default_rng(0)
    key = RunKey.from_test_seed(0)
    data = collections.OrderedDict(
        x=rng.normal(size=(_NUM_CLIENTS, 20, *model.input_shape)).astype(np.float32),
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


ROUNDS = {
    "dp_fed_avg": Round(
        "DP FedAvg of tff.learning",
        lambda: _fed_avg(0.0).initialize(),
        functools.partial(_fed_avg_round, 0.0),
        noised=_noised_fed_avg,
        is_repeatable=False,
    ),
    "dp_sgd": Round("MR-MTL with DP-SGD", functools.partial(_start, "linear"), functools.partial(_next, "linear")),
    "convolution": Round(
        "MR-MTL with DP-SGD, convolutions",
        functools.partial(_start, "convolutional"),
        functools.partial(_next, "convolutional"),
        tolerance=CONVOLUTION_TOLERANCE,
        reference=("inprocess", "loop"),
    ),
}


def _flat(structure: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in tf.nest.flatten(structure)])
