"""What a client does in a round in which it learns nothing: for the shapes of what it keeps and releases."""

import collections

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientData, ClientResult, LocalSteps, State, map_weights, split
from tff_pdp.models.base import Model, Weights
from tff_pdp.privacy.mechanisms.selection import NOTHING


def initial_weights(model: Model) -> Weights:
    """The model's initial weights, as tensors."""
    return collections.OrderedDict((name, tf.constant(array)) for name, array in model.init(0).items())


def round_without_gradients(algorithm: Algorithm, message: State, model: Model) -> ClientResult:
    """What a new client keeps and releases after a round in which it has no examples and its gradients are zero.

    Args:
      algorithm: what the client does.
      message: what it receives.
      model: what it trains.
    """
    once = LocalSteps(tf.constant(1), tf.constant(1))
    hparams = {name: tf.constant(value) for name, value in algorithm.hparams.items()}
    hparams |= dict.fromkeys(algorithm.step_hparams, once)
    labels = tf.constant(np.zeros(0, model.label_dtype))
    nothing = ClientData(tf.zeros([0, *model.input_shape]), labels, tf.constant(0))

    def no_gradient(current, data, index, scale, pull=None, trainable=None):
        del data, index, scale, pull
        return map_weights(tf.zeros_like, split(current, trainable or current)[0])

    given = {**hparams, "selected": tf.constant(NOTHING)}
    return algorithm.client_update(message, algorithm.init_client(message), nothing, no_gradient, given)


def num_released(algorithm: Algorithm, model: Model) -> int:
    """How many values a client releases in a round."""
    message = algorithm.broadcast(algorithm.init_server(initial_weights(model)))
    released = round_without_gradients(algorithm, message, model).released
    return sum(int(tf.size(value)) for value in tf.nest.flatten(dict(released)))
