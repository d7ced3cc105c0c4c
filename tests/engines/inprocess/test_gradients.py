"""Gradients as older TensorFlow programs take them: added to the graph itself."""

import numpy as np
import pytest
import tensorflow as tf

from tests.engines.inprocess.inprocess_support import VECTOR, Cases, vectors
from tff_pdp import _tff

pytestmark = pytest.mark.timeout(120)

cases = Cases()


@_tff.tensorflow_computation(VECTOR)
def gradient_of_mean(x):
    # The gradient is placed beside operations that only the mean itself needs.
    return tf.gradients(tf.reduce_mean(x**3), x)[0]


@cases.add
def gradient_at_the_server():
    return gradient_of_mean(vectors(1)[0])


@cases.add
def gradients_at_clients():
    @_tff.federated_computation(_tff.at_clients(VECTOR))
    def gradients(x):
        return _tff.federated_map(gradient_of_mean, x)

    return gradients(vectors())


@cases.add
def gradient_of_a_variable():
    @_tff.tensorflow_computation(VECTOR)
    def step(x):
        weights = tf.Variable(tf.ones([3]))
        gradient = tf.gradients(tf.reduce_sum((weights - x) ** 2), [weights])[0]
        with tf.control_dependencies([weights.assign_sub(0.1 * gradient)]):
            return weights.read_value()

    return step(vectors(1)[0])


@cases.add
def optimizer_of_tensorflow_1():
    @_tff.tensorflow_computation(VECTOR)
    def step(x):
        weights = tf.compat.v1.get_variable(
            "weights", [3], initializer=tf.compat.v1.zeros_initializer(), use_resource=True
        )
        loss = tf.reduce_sum((weights - x) ** 2)
        with tf.control_dependencies([tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)]):
            return weights.read_value()

    return [step(x) for x in vectors(2)]


@cases.add
def gradient_inside_a_function():
    @tf.function
    def gradient(x):
        return tf.gradients(tf.reduce_mean(x**3), x)[0]

    @_tff.tensorflow_computation(VECTOR)
    def call(x):
        return gradient(x)

    return call(np.ones(3, np.float32))


@pytest.mark.parametrize("name", cases)
def test_same_as_the_native_engine(name, mode, native_engine, caplog):
    cases.check(name, mode, native_engine, caplog)
