"""What tests of methods with heads share: a body and a head of one weight each, trained by hand."""

import collections

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.hyper_parameters import LocalSteps

HEAD = ("head",)


def two_weights(body, head):
    return collections.OrderedDict(body=tf.constant([body], tf.float32), head=tf.constant([head], tf.float32))


def values(weights):
    """By name, of weights of one value each."""
    return {name: float(np.squeeze(value)) for name, value in weights.items()}


def product_to(target, asked=None):
    """The gradient of `(body * head - target)^2 / 2`.

    Args:
      target: of the product.
      asked: a list that the number of each gradient that moves anything is added to, with the names it is asked for.
    """

    def grad_fn(current, data, index, scale, pull=None, trainable=None):
        del data, pull
        names = list(current if trainable is None else trainable)

        def note(number, size):
            if asked is not None and size:
                asked.append((int(number), names))
            return size

        noted = tf.numpy_function(note, [index, scale], tf.float32)
        noted.set_shape([])
        error = noted * (current["body"] * current["head"] - target)
        gradient = {"body": error * current["head"], "head": error * current["body"]}
        return collections.OrderedDict((name, gradient[name]) for name in names)

    return grad_fn


def hparams(**given):
    """Scalars as an algorithm receives them; steps are a count, or a count and a bound."""

    def one(name, value):
        if not name.endswith("_steps"):
            return tf.constant(value)
        count, bound = value if isinstance(value, tuple) else (value, value)
        return LocalSteps(tf.constant(count), tf.constant(bound))

    return {name: one(name, value) for name, value in given.items()}


def assert_values(weights, **expected):
    assert values(weights) == expected
