"""Fits the personal part of exported models to clients that were not in training.

Shared weights do not change. A client starts from the global model's row and trains the personal part, such as the head
or the descriptor from which a hypernetwork makes weights. Many clients are fitted in one computation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from serving.models import GLOBAL_ROW, HYPERNETWORK, PersonalModels
from tff_pdp.algorithms.base import ClientData, GradientEstimator
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.data.client_dataset import ClientExamples
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.examples import bucket_sizes
from tff_pdp.models.base import Model
from tff_pdp.models.derived import SCALE, SHIFT, over_fixed_weights
from tff_pdp.processes.vectorizable import map_stack

Arrays = dict[str, np.ndarray]
# Called with the number of clients that are done.
Progress = Callable[[int], object]

_INPUT_SCALING = (SHIFT, SCALE)
_CLIENTS_AT_A_TIME = 256
# Number of values of padded examples, and of the random draws for them, in one computation: about 256 MiB.
_VALUES_AT_A_TIME = 2**26


def fitted_names(models: PersonalModels) -> tuple[str, ...]:
    """Returns the names of the arrays that a new client trains.

    If clients own arrays of the head, a client trains these arrays; otherwise, all arrays that clients own. With a
    hypernetwork, a client trains its whole row. The scaling of inputs is never trained: it would be a statistic of the
    client's examples, and would cost a silo's budget.

    Raises:
      ConfigError: clients own no array that can be trained.
    """
    owned = [name for name in models.stacked if name not in _INPUT_SCALING]
    if not owned:
        raise ConfigError(
            "this method has no personal part: all clients share one model, which answers new clients already, as "
            "the global model. To add clients, export a method with a personal part, such as centaur or mr_mtl"
        )
    head = [name for name in owned if name in models.model.head]
    return tuple(owned if models.layout == HYPERNETWORK else head or owned)


def model_of_rows(models: PersonalModels, names: Sequence[str]) -> Model:
    """Returns a model whose only weights are the named arrays; all other arrays are fixed, as in the global model.

    `names` are names of stacked arrays: weights, or arrays that weights are made from. The result's `init` returns the
    global model's values of these arrays.
    """
    start = {name: stack[GLOBAL_ROW] for name, stack in models.stacked.items()}
    own = {name: start[name] for name in names}
    fixed = {name: tf.constant(array) for name, array in start.items() if name not in own}
    shared = {name: tf.constant(array) for name, array in models.shared.items()}
    make_weights = models.make_weights
    if make_weights is None:
        return over_fixed_weights(models.model, own, {**shared, **fixed})
    return over_fixed_weights(models.model, own, {}, lambda weights: make_weights(shared, {**fixed, **weights}))


def fit_rows(
    model: Model,
    clients: Sequence[ClientExamples],
    estimator: GradientEstimator,
    steps: int,
    learning_rate: float,
    mechanism: Mapping[str, np.ndarray],
    seeds: np.ndarray,
    progress: Progress,
) -> Arrays:
    """Trains every client's own weights, starting from the model's initial weights.

    Guarantee: a client's result is a function of the client's own examples, mechanism and seed, and of the model's
      fixed and initial weights. With the estimator of `privacy.mechanisms.dp_sgd`, the result is post-processing of
      `steps` gradients of that estimator, each with an index of its own.
    Assumes: seeds are secret and new in each call; fixed and initial weights are public, or have been made private.

    Args:
      model: result of `model_of_rows`.
      clients: examples of each client; every client has at least one.
      estimator: estimator of gradients, built for `model`.
      steps: number of gradient steps of each client.
      learning_rate: learning rate of each step.
      mechanism: parameters of the estimator's mechanism, float32 `[clients]` by name.
      seeds: seed of each client, int64 `[clients, 2]`.
      progress: function that is called with the number of clients done since its last call.

    Returns:
      The trained weights of all clients, float32 `[clients, ...]` by name.
    """
    initial = model.init(0)
    start = {name: tf.constant(array) for name, array in initial.items()}
    values_of_step = model.num_parameters() + 1

    signature = (*_examples_spec(model), _spec_of(dict.fromkeys(mechanism, ())), tf.TensorSpec([None, 2], tf.int64))

    @tf.function(input_signature=signature, autograph=False)
    def fit_stack(x: Any, y: Any, num_examples: Any, parameters: Any, own_seeds: Any) -> Any:
        num_steps = tf.fill(tf.shape(num_examples), steps)
        draws = estimator.draw(parameters, num_examples, tf.shape(y)[1], num_steps, own_seeds)
        local_steps = LocalSteps(tf.constant(steps), tf.constant(steps))

        def fit_one(own: Any) -> Any:
            *data, own_parameters, own_draws = own

            def grad_fn(weights, examples, index, scale, pull=None, trainable=None):
                return estimator.gradient(own_parameters, own_draws, weights, examples, index, scale, pull, trainable)

            rate = tf.constant(learning_rate)
            return dict(local_sgd(start, ClientData(*data), grad_fn, learning_rate=rate, local_steps=local_steps))

        return map_stack(fit_one, (x, y, num_examples, parameters, draws))

    columns = {name: np.asarray(values, np.float32) for name, values in mechanism.items()}
    rows = {name: np.empty((len(clients), *array.shape), np.float32) for name, array in initial.items()}
    for places, stacked in stacks(clients, model, lambda padded: steps * (padded + values_of_step)):
        own_columns = {name: values[places] for name, values in columns.items()}
        for name, values in fit_stack(*stacked, own_columns, seeds[places]).items():
            rows[name][places] = values.numpy()
        progress(len(places))
    return rows


def measure_rows(model: Model, clients: Sequence[ClientExamples], rows: Arrays | None = None) -> Arrays:
    """Returns the mean metrics of each client on its own examples; the metrics are exact, not private.

    Args:
      model: result of `model_of_rows`.
      clients: examples of each client; a client without examples gets NaN.
      rows: each client's weights of `model`, `[clients, ...]` by name; by default the initial weights for all.

    Returns:
      The means of `Model.example_metrics`, float32 `[clients]` by name.
    """
    start = model.init(0)

    signature = (*_examples_spec(model), _spec_of({name: array.shape for name, array in start.items()}))

    @tf.function(input_signature=signature, autograph=False)
    def measure_stack(x: Any, y: Any, num_examples: Any, weights: Any) -> Any:
        def measure_one(own: Any) -> Any:
            own_x, own_y, size, own_weights = own
            is_own = tf.cast(tf.range(tf.shape(own_y)[0]) < size, tf.float32)
            metrics = model.example_metrics(own_weights, own_x, own_y)
            count = tf.cast(size, tf.float32)
            return {name: tf.reduce_sum(is_own * values) / count for name, values in metrics.items()}

        return map_stack(measure_one, (x, y, num_examples, weights))

    found: Arrays = {}
    for places, stacked in stacks(clients, model):
        if rows is None:
            weights = {name: np.broadcast_to(array, (len(places), *array.shape)) for name, array in start.items()}
        else:
            weights = {name: array[places] for name, array in rows.items()}
        for name, values in measure_stack(*stacked, weights).items():
            found.setdefault(name, np.full(len(clients), np.nan, np.float32))[places] = values.numpy()
    return found


def stacks(
    clients: Sequence[ClientExamples], model: Model, values_of_client: Callable[[int], int] = lambda padded: 0
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Pads clients' examples to a few sizes, and yields stacks of as many equally padded clients as memory allows.

    `values_of_client` is a function from a client's padded number of examples to the number of values that the client
    needs in memory besides the examples.

    Yields:
      Positions of some clients, int64; and these clients' `x [clients, rows, *shape]`, `y [clients, rows]` and
      `num_examples [clients]`.
    """
    sizes = np.array([len(own.y) for own in clients], np.int32)
    padded = bucket_sizes(sizes, rows_of_a_call=float(_CLIENTS_AT_A_TIME))
    for size in np.unique(padded):
        values = size * (int(np.prod(model.input_shape, dtype=np.int64)) + 1) + values_of_client(int(size))
        width = int(np.clip(_VALUES_AT_A_TIME // values, 1, _CLIENTS_AT_A_TIME))
        group = np.flatnonzero(padded == size)
        for first in range(0, len(group), width):
            places = group[first : first + width]
            x = np.zeros((len(places), size, *model.input_shape), np.float32)
            y = np.zeros((len(places), size), model.label_dtype)
            for row, place in enumerate(places):
                x[row, : sizes[place]], y[row, : sizes[place]] = clients[place].x, clients[place].y
            yield places, (x, y, sizes[places])


def _examples_spec(model: Model) -> tuple[tf.TensorSpec, ...]:
    label: Any = model.label_dtype
    examples = tf.TensorSpec([None, None, *model.input_shape], tf.float32)
    return examples, tf.TensorSpec([None, None], label), tf.TensorSpec([None], tf.int32)


def _spec_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec([None, *shape], tf.float32) for name, shape in shapes.items()}
