"""TensorFlow graphs: variables, tables, control flow, functions, gradients, seeded random numbers."""

import numpy as np
import pytest
import tensorflow as tf

from tests.engines.inprocess.inprocess_support import OPEN, VECTOR, Cases, count_in_variable, vectors
from tff_pdp import _tff

pytestmark = pytest.mark.timeout(120)

cases = Cases()


@cases.add
def variables_at_the_server():
    @_tff.tensorflow_computation(np.float32)
    def compute(x):
        first, second = tf.Variable(x), tf.Variable([1.0, 2.0])
        with tf.control_dependencies([first.assign_add(1.0), second.assign(second + x)]):
            return first.read_value(), second.read_value()

    @_tff.tensorflow_computation(np.float32)
    def twice(x):
        # Both calls import the graph above, each with variables of its own.
        return compute(x), compute(x + 1)

    return compute(1.0), compute(5.0), twice(2.0), count_in_variable(1), count_in_variable(1)


@cases.add_one_by_one
def variables_at_clients():
    @_tff.federated_computation(_tff.at_clients(np.int32))
    def count(x):
        return _tff.federated_map(count_in_variable, x)

    return count([1, 2, 3]), count([4])


@cases.add
def tables():
    @_tff.tensorflow_computation(OPEN, np.int64)
    def look_up(contents, key):
        keys = tf.range(tf.shape(contents, tf.int64)[0])
        initializer = tf.lookup.KeyValueTensorInitializer(keys, contents)
        return tf.lookup.StaticHashTable(initializer, -1.0).lookup(key)

    @_tff.tensorflow_computation(_tff.TensorType(np.str_, [None]))
    def number(words):
        initializer = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([5, 6], tf.int64))
        return tf.lookup.StaticVocabularyTable(initializer, 3).lookup(words)

    contents = [np.array([1, 2], np.float32), np.array([7, 8, 9], np.float32)]
    return [look_up(c, np.int64(1)) for c in contents], look_up(contents[0], np.int64(2)), number(["b", "a", "zzz"])


@cases.add_one_by_one
def tables_at_clients():
    @_tff.tensorflow_computation(OPEN)
    def look_up(contents):
        initializer = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1]), contents)
        return tf.lookup.StaticHashTable(initializer, -1.0).lookup(tf.constant([1, 2]))

    @_tff.federated_computation(_tff.at_clients(OPEN))
    def look_up_everywhere(contents):
        return _tff.federated_map(look_up, contents)

    return look_up_everywhere([v[:2] for v in vectors(3)])


@cases.add_one_by_one
def control_flow_at_clients():
    @_tff.tensorflow_computation(np.int32)
    def steps(n):
        return tf.while_loop(
            lambda n, i: n > 1,
            lambda n, i: (tf.cond(tf.equal(n % 2, 0), lambda: n // 2, lambda: 3 * n + 1), i + 1),
            (n, 0),
        )[1]

    @_tff.federated_computation(_tff.at_clients(np.int32))
    def all_steps(n):
        return _tff.federated_map(steps, n)

    return all_steps([1, 6, 27])


@cases.add
def operations_that_no_result_needs():
    @_tff.tensorflow_computation(np.int32)
    def compute(x):
        # TFF runs neither of the two; in a traced function they would both run.
        tf.debugging.assert_equal(x, -1)
        count = tf.Variable(10)
        count.assign_add(1)
        return count.read_value() + x

    @_tff.tensorflow_computation(np.int32)
    def compute_at_client(x):
        tf.debugging.assert_equal(x, -1)
        return x + 1

    @_tff.federated_computation(_tff.at_clients(np.int32))
    def everywhere(x):
        return _tff.federated_map(compute_at_client, x)

    return compute(1), everywhere([1, 2])


@cases.add
def functions_of_one_name_with_different_definitions():
    @tf.function
    def scale(x):
        return x * tf.reduce_sum(x)

    @_tff.tensorflow_computation(VECTOR)
    def first(x):
        return scale(x)

    @_tff.tensorflow_computation(_tff.TensorType(np.float64, [2, 2]))
    def second(x):
        return scale(x), tf.map_fn(scale, x)

    @_tff.federated_computation(VECTOR, _tff.TensorType(np.float64, [2, 2]))
    def both(x, y):
        return first(x), second(y), first(first(x))

    x, y = vectors(1)[0], np.arange(4.0).reshape(2, 2)
    return first(x), second(y), both(x, y)


@cases.add_one_by_one
def training_with_gradients():
    @_tff.tensorflow_computation(_tff.TensorType(np.float32, [None, 3]), OPEN, VECTOR)
    def descend(x, y, weights):
        @tf.function
        def step(weights, _):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
            return weights - 0.1 * tape.gradient(loss, weights)

        return tf.scan(step, tf.range(4), weights)[-1]

    @_tff.federated_computation(
        _tff.at_clients(_tff.TensorType(np.float32, [None, 3])), _tff.at_clients(OPEN), _tff.at_server(VECTOR)
    )
    def descend_everywhere(x, y, weights):
        return _tff.federated_mean(_tff.federated_map(descend, (x, y, _tff.federated_broadcast(weights))))

    rng = np.random.default_rng(0)
    x = [rng.normal(size=(n, 3)).astype(np.float32) for n in (2, 5, 3)]
    return descend_everywhere(x, [rows[:, 0] for rows in x], np.ones(3, np.float32))


@cases.add
def stateless_random_numbers():
    @_tff.tensorflow_computation(_tff.TensorType(np.int32, [2]))
    def draw(seed):
        return tf.random.stateless_normal([4], seed)

    @_tff.federated_computation(_tff.at_clients(_tff.TensorType(np.int32, [2])))
    def draws(seed):
        values = _tff.federated_map(draw, seed)
        return values, _tff.federated_sum(values)

    return draws([np.array([i, 7], np.int32) for i in range(3)])


@pytest.mark.parametrize("name", cases)
def test_same_as_the_native_engine(name, mode, native_engine, caplog):
    cases.check(name, mode, native_engine, caplog)
