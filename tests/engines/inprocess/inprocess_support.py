"""What the tests of the in-process engine share: engines, cases to compare with the native one, small computations."""

import contextlib

import numpy as np
import tensorflow as tf

from tests.engines.engine_equality import assert_same
from tff_pdp import _tff
from tff_pdp.engines.running import build_engine

MODES = ("loop", "vectorized")  # How clients are computed: one by one, or as stacks.
VECTOR = _tff.TensorType(np.float32, [3])
OPEN = _tff.TensorType(np.float32, [None])
SEQUENCE = _tff.SequenceType(np.int32)


def inprocess(mode="loop", **options):
    """An engine that is closed at the end of a `with`. Every test has its own, which has traced nothing yet."""
    return contextlib.closing(build_engine("inprocess", client_parallelism=mode, **options))


def num_traced(engine):
    """Number of TensorFlow functions traced so far: constant once every computation has run."""
    programs = engine._programs.values()
    return sum(len(own) for one in programs for own in (one._server_steps, one._client_steps, one._merge_steps))


def vectors(num_clients=3, seed=0):
    return list(np.random.default_rng(seed).normal(scale=10, size=(num_clients, 3)).astype(np.float32))


def messages_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("tff_pdp")]


# Comparisons with the native engine
# ----------------------------------


class Cases(dict):
    """Cases of a file by name: functions that build computations, call them, and return the results."""

    def __init__(self):
        super().__init__()
        self.never_stacked = set()
        self._native = {}

    def add(self, function):
        self[function.__name__] = function
        return function

    def add_one_by_one(self, function):
        """Adds a case whose clients hold data sets, variables, tables or control flow."""
        self.never_stacked.add(function.__name__)
        return self.add(function)

    def check(self, name, mode, native_engine, caplog):
        """Fails where a case returns something else than on the native engine, or is stacked where it should not be."""
        if name not in self._native:
            with native_engine.install():
                self._native[name] = self[name]()
        expected = self._native[name]
        with caplog.at_level("WARNING", logger="tff_pdp"), inprocess(mode) as engine, engine.install():
            print(f"{name}, {mode}: {assert_same(self[name](), expected):.2g}")
        messages = messages_of(caplog)
        assert bool(messages) == (mode == "vectorized" and name in self.never_stacked), messages


# Computations
# ------------


@_tff.tensorflow_computation(np.int32, np.int32)
def add(a, b):
    return a + b


@_tff.tensorflow_computation(np.int32)
def square(a):
    return a * a


@_tff.tensorflow_computation(VECTOR)
def double(x):
    return 2 * x


@_tff.tensorflow_computation(VECTOR, VECTOR)
def squared_difference(x, y):
    return (x - y) ** 2


@_tff.tensorflow_computation(np.int32)
def count_in_variable(step):
    count = tf.Variable(10)
    with tf.control_dependencies([count.assign_add(step)]):
        return count.read_value()


@_tff.federated_computation(_tff.at_clients(np.int32))
def count_everywhere(steps):
    return _tff.federated_map(count_in_variable, steps)


@_tff.tensorflow_computation(OPEN)
def negate(x):
    return -x


@_tff.federated_computation(_tff.at_server(VECTOR), _tff.at_clients(VECTOR), _tff.at_clients(OPEN))
def next_round(state, client_state, data):
    changed = _tff.federated_map(squared_difference, (client_state, _tff.federated_broadcast(state)))
    return state, client_state, _tff.federated_mean(changed), _tff.federated_map(negate, data)
