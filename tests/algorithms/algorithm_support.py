"""What tests of single algorithms share: one weight, and a gradient that can be followed by hand."""

import collections

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData
from tff_pdp.algorithms.hyper_parameters import LocalSteps

NO_DATA = ClientData(x=tf.zeros([0, 1]), y=tf.zeros([0], tf.int64), num_examples=tf.constant(0))


def weights(value):
    return collections.OrderedDict(w=tf.constant([value], tf.float32))


def stack(*values):
    """Weights with a first axis of clusters or clients."""
    return collections.OrderedDict(w=tf.constant([[value] for value in values], tf.float32))


def pull_to(target):
    """The gradient of `(w - target)^2 / 2`, so that every step can be followed by hand."""

    def grad_fn(current, data, index, scale, pull=None, trainable=None):
        del data, index
        pulled = current["w"] - target + (0.0 if pull is None else pull["w"])
        gradient = collections.OrderedDict(w=scale * pulled)
        return gradient if trainable is None else {name: gradient[name] for name in trainable}

    return grad_fn


def hparams(local_steps=1, bound=None, **values):
    """Scalars as an algorithm receives them; without a bound the client is not computed together with others."""
    bound = local_steps if bound is None else bound
    steps = LocalSteps(tf.constant(local_steps), tf.constant(bound))
    return {**{name: tf.constant(value) for name, value in values.items()}, "local_steps": steps}
