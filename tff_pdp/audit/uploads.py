"""Repeats the first round of a run, and keeps each silo's own upload, as the server sees it.

The round uses the run's own key, so that batches and noise are the same as in the run: nothing new is released, and
nothing is charged. The algorithm runs in a variant whose server collects each client's release as a row, in place of
means or sums.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import RUNTIME_HPARAMS, Algorithm, ClientData, ClientResult, map_weights, split
from tff_pdp.algorithms.hyper_parameters import SET_BY_RUNTIME, LocalSteps, Steps
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.base import Model, Weights
from tff_pdp.privacy.mechanisms.selection import NOTHING, build_selector
from tff_pdp.processes.client_work import dry_round, initial_weights
from tff_pdp.processes.compose import compose

FIRST_ROUND = 1
# Tolerance of float32 sums, relative to the largest factor of a gradient.
_TOLERANCE = 1e-3
# Random examples that coordinates without signal are looked for with.
_NUM_PROBES = 64


class Upload(NamedTuple):
    """A silo's upload in the first round.

    Attributes:
      change: difference between the upload and the upload without any gradient, by name of the weights.
      gain: root of the sum of squares of the factors with which the round's gradients enter the upload.
      num_gradients: number of gradients that enter the upload.
    """

    change: Mapping[str, np.ndarray]
    gain: float
    num_gradients: int


def recording(algorithm: Algorithm, model: Model, num_clients: int) -> Algorithm:
    """Returns the variant of an algorithm whose server state keeps each client's releases.

    Clients compute and release the same as in `algorithm`. The server state is `{algorithm: state of the algorithm,
    never updated; rows: by name of the release, {rows: [num_clients, ...], present: [num_clients]}}`.
    """
    message = algorithm.broadcast(algorithm.init_server(initial_weights(model)))
    released = dry_round(algorithm, message, model).released

    def no_rows(value: Any) -> tf.Tensor:
        return tf.zeros([num_clients, *value.shape], value.dtype)

    def init_server(weights):
        rows = collections.OrderedDict(
            (
                name,
                collections.OrderedDict(
                    rows=_map(no_rows, released[name]), present=tf.zeros([num_clients], tf.float32)
                ),
            )
            for name in algorithm.released
        )
        return {"algorithm": algorithm.init_server(weights), "rows": rows}

    def server_update(state, aggregates):
        rows = collections.OrderedDict((name, aggregates[name]) for name in algorithm.released)
        return {"algorithm": state["algorithm"], "rows": rows}

    of_server = algorithm.global_model
    return dataclasses.replace(
        algorithm,
        released=dict.fromkeys(algorithm.released, "rows"),
        num_clients=num_clients,
        hparams={**algorithm.hparams, "client_index": SET_BY_RUNTIME},
        public={},
        public_values=None,
        init_server=init_server,
        broadcast=lambda state: algorithm.broadcast(state["algorithm"]),
        server_update=server_update,
        global_model=None if of_server is None else lambda state: of_server(state["algorithm"]),
        adapt=None,
    )


def recording_method(method: Method, model_seed: int, selection_loss_bound: float) -> Method:
    """Returns a method with the clients, plan and parameters of `method` and the computations of `recording`."""
    algorithm = recording(method.algorithm, method.model, len(method.clients.client_ids))
    selector = None
    if algorithm.candidates is not None:
        selector = build_selector(method.model, selection_loss_bound, method.plan.generator)
    process = compose(algorithm, method.model, estimator=method.estimator, selector=selector, model_seed=model_seed)
    return dataclasses.replace(method, algorithm=algorithm, process=process, amounts=None)


def check_readable(method: Method) -> None:
    """Checks that a method's uploads can be read as weights plus a weighted sum of gradients.

    Raises:
      ConfigError: nothing leaves a silo, or uploads are of another kind.
    """
    algorithm, name = method.algorithm, f"algorithms.{method.algorithm.name}"
    if method.first_phase is not None:
        raise ConfigError(f"{name}: uploads are made of synthetic data, and have no noise from which to read a budget")
    if not algorithm.released:
        raise ConfigError(f"{name}: nothing leaves a silo in training, so there are no uploads to read budgets from")
    if algorithm.candidates is not None:
        raise ConfigError(
            f"{name}: an upload depends on a private selection of a cluster, so it is not the sum of a round's steps; "
            "audit a method without selection"
        )


def first_uploads(method: Method, recorder: Method, run_key: RunKey, model_seed: int) -> dict[str, Upload]:
    """Repeats a run's first round and returns the uploads by silo, for the silos that take part. Needs an engine.

    Args:
      method: the method of the run.
      recorder: the `recording_method` of the method.
      run_key: the run's key, with the number of the attempt in which the first round was run.
      model_seed: seed of the initial weights.

    Raises:
      ConfigError: the method's uploads are not of the kind that `check_readable` and `noise_gain` describe.
    """
    check_readable(method)
    client_ids = list(method.clients.client_ids)
    places = method.plan.cohort(FIRST_ROUND, client_ids, run_key.cohort_generator)
    changed = method.hook.hparams(method.hook.init(), places) if method.hook else {}
    params = recorder.client_params(run_key, FIRST_ROUND, places, changed=changed)
    server_state = recorder.process.initialize()
    states = [recorder.process.init_client(server_state)] * len(places)
    data = recorder.client_data("train").select(places)
    after, _, _ = recorder.process.next(server_state, states, data, params)
    weights = initial_weights(method.model, model_seed)
    probes: dict[Any, tuple[str, Weights, float, int]] = {}
    found = {}
    for place, own in zip(places, params, strict=True):
        hparams = {name: own["hparams"][name] for name in method.algorithm.hparams}
        # Index and epsilon are each silo's own; the response to a gradient does not depend on them.
        key = tuple(float(hparams[name]) for name in hparams if name not in RUNTIME_HPARAMS)
        if key not in probes:
            probes[key] = noise_gain(method.algorithm, method.model, weights, hparams)
        name, start, gain, count = probes[key]
        rows = after["algorithm"]["rows"][name]["rows"]
        change = {one: np.asarray(rows[one][place]) - np.asarray(value) for one, value in start.items()}
        found[client_ids[place]] = Upload(change, gain, count)
    return found


def noise_gain(
    algorithm: Algorithm, model: Model, weights: Weights, hparams: Mapping[str, Any]
) -> tuple[str, Weights, float, int]:
    """Measures how the gradients of a client's first round enter the client's upload.

    The client update is run without data: once with gradients of zero, and with gradients that are 1 in one coordinate.
    Steps, rates, momentum and pulls are public, so the server can do the same. For tau plain steps of rate eta the gain
    is `eta sqrt(tau)`.

    Args:
      algorithm: algorithm of the client, without candidates.
      model: model that the client trains.
      weights: initial weights.
      hparams: the client's hyper-parameters by name, numbers or scalar arrays.

    Returns:
      Name of the release that holds weights; the release without any gradient; the gain; the number of gradients with
      an effect on the release.

    Raises:
      ConfigError: no release holds weights of the model, or an upload is not a sum in which each gradient has one
        factor for all coordinates.
    """
    message = algorithm.broadcast(algorithm.init_server(weights))
    given: dict[str, Any] = {"selected": tf.constant(NOTHING)}
    for name, one in algorithm.hparams.items():
        value = tf.constant(np.asarray(hparams[name], one.dtype))
        given[name] = LocalSteps(value, value) if isinstance(one, Steps) else value
    key = f"algorithms.{algorithm.name}"

    def released(gradient_of: Any) -> Mapping[str, Any]:
        nothing = ClientData(
            tf.zeros([0, *model.input_shape]), tf.constant(np.zeros(0, model.label_dtype)), tf.constant(0)
        )

        def grad_fn(current, data, index, scale, pull=None, trainable=None):
            if pull is not None:
                raise ConfigError(f"{key}: the clip shortens a pull before it is noised, by a factor that is not known")
            asked = split(current, trainable or list(current))[0]
            return map_weights(lambda value: scale * value, gradient_of(index, asked))

        state = algorithm.init_client(message)
        result: ClientResult = algorithm.client_update(message, state, nothing, grad_fn, given)
        return result.released

    still = released(lambda index, asked: map_weights(tf.zeros_like, asked))
    name = next((one for one, value in still.items() if _holds_weights(value, weights)), None)
    if name is None:
        raise ConfigError(f"{key}: no release consists of weights of the model, so no upload shows the noise of steps")
    start = collections.OrderedDict((one, np.asarray(value)) for one, value in still[name].items())
    size = sum(value.size for value in start.values())
    count = int(algorithm.num_gradients({one: np.asarray(hparams[one]) for one in algorithm.step_hparams}))
    squares, effective = 0.0, 0
    for first in range(0, count, size):
        places = np.linspace(0, size - 1, min(size, count - first)).astype(np.int32)
        factors, others = (_factors(released, name, start, first, order) for order in (places, places[::-1]))
        if factors is None or others is None or not _alike(factors, others):
            raise ConfigError(
                f"{key}: an upload is not a sum of the round's gradients, each with one factor for all coordinates, so "
                "the noise on it does not show z"
            )
        squares += float(np.sum(np.square(factors)))
        effective += int(np.count_nonzero(factors))
    if not squares:
        raise ConfigError(
            f"{key}: no gradient enters an upload of the first round, so that the upload has no noise to read; audit a "
            "method whose first round takes steps"
        )
    return name, start, math.sqrt(squares), effective


def quiet_coordinates(model: Model, frame: np.ndarray) -> dict[str, np.ndarray]:
    """Finds the weights on which examples have no effect if a frame of the inputs is zero; returns bool arrays by name.

    A weight is quiet if its gradient is zero for random examples with a frame of zeros, and not zero for random
    examples with a random frame. For a dense first layer these are the rows of the frame's inputs.

    Args:
      model: the model.
      frame: bool array of `model.input_shape`; true where inputs are zero in all examples.
    """
    # Public, and only to find coordinates: nothing is protected by these draws.
    inside = _values([_NUM_PROBES, *model.input_shape], 1) * ~frame
    weights = collections.OrderedDict(
        (name, tf.constant(_values(value.shape, 2 + place) * 0.1))
        for place, (name, value) in enumerate(model.init(0).items())
    )
    labels = np.arange(_NUM_PROBES) % max(model.num_classes, 2)
    without, with_frame = (
        _has_gradient(model, weights, x, labels) for x in (inside, _values([_NUM_PROBES, *model.input_shape], 1))
    )
    found = {name: ~without[name] & with_frame[name] for name in weights}
    return {name: mask for name, mask in found.items() if mask.any()}


def _values(shape: Sequence[int], start: int) -> np.ndarray:
    """Returns numbers between -1 and 1 that look random: float32 of a shape."""
    # Multiples of an irrational number, modulo 1, do not repeat.
    numbers = np.arange(1, 1 + math.prod(shape), dtype=np.float64)
    return np.float32(2 * np.mod(numbers * math.sqrt(2) * start + np.square(numbers) * math.pi, 1) - 1).reshape(shape)


def _has_gradient(model: Model, weights: Weights, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    with tf.GradientTape() as tape:
        tape.watch(list(weights.values()))
        loss = model.loss(weights, tf.constant(np.float32(x)), tf.constant(labels.astype(model.label_dtype)))
        total = tf.reduce_sum(loss)
    gradients = tape.gradient(total, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return {name: np.asarray(value) != 0 for name, value in gradients.items()}


def _holds_weights(released: Any, weights: Weights) -> bool:
    return (
        isinstance(released, Mapping)
        and len(released) > 0
        and all(name in weights and value.shape == weights[name].shape for name, value in released.items())
    )


def _factors(released: Any, name: str, start: Weights, first: int, places: np.ndarray) -> np.ndarray | None:
    """Returns the factor of each gradient from number `first` on; None if a gradient has an effect elsewhere."""
    sizes = {one: value.size for one, value in start.items()}
    size = sum(sizes.values())

    def impulse(index: tf.Tensor, asked: Weights) -> Weights:
        number = tf.convert_to_tensor(index) - first
        is_inside = tf.logical_and(number >= 0, number < len(places))
        place = tf.gather(places, tf.clip_by_value(number, 0, len(places) - 1))
        flat = tf.where(is_inside, tf.one_hot(place, size), 0.0)
        parts = dict(zip(sizes, tf.split(flat, list(sizes.values())), strict=True))
        # Weights that stay at the client have no impulses: the upload does not show them.
        return collections.OrderedDict(
            (one, tf.reshape(parts[one], value.shape) if one in parts else tf.zeros_like(value))
            for one, value in asked.items()
        )

    moved = released(impulse)[name]
    change = np.concatenate([(np.asarray(moved[one]) - value).ravel() for one, value in start.items()])
    factors = change[places].astype(np.float64)
    elsewhere = np.delete(change, places)
    if elsewhere.size and np.abs(elsewhere).max() > _TOLERANCE * np.abs(factors).max():
        return None
    factors[np.abs(factors) <= _TOLERANCE * np.abs(factors).max()] = 0.0
    return factors


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= _TOLERANCE * np.abs(one).max())


def _map(function: Any, nest: Any) -> Any:
    if isinstance(nest, Mapping):
        return collections.OrderedDict((name, _map(function, value)) for name, value in nest.items())
    return function(nest)
