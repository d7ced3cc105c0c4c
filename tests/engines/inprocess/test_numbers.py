"""Which numbers a computation takes: those of its types, as the native engine has it."""

import numpy as np
import pytest
import tensorflow as tf

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import inprocess
from tff_pdp import _tff
from tff_pdp.engines import structures

pytestmark = pytest.mark.timeout(120)

TYPES = {
    np.dtype(dtype).name: dtype
    for dtype in (np.int8, np.uint8, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64, np.complex64)
} | {"bool": np.bool_}
NUMBERS = {
    **{repr(x): x for x in (5, -1, 200, 2**32 + 5, 2**63, True, 1.5, 7e4, -1e300, float("inf"), float("nan"), 1j)},
    **{f"np.{name}(1)": dtype(1) for name, dtype in TYPES.items()},
    **{f"{name} tensor": tf.constant(1, name) for name in ("int16", "int32", "float16", "float32")},
    "variable": tf.Variable(1, dtype=tf.int16),
    "string": "1",
}
PAIRS = {
    **{
        repr(x): x
        for x in ([5, 6], (1, 2), [200, 1], [2**40, 1], [-1, 1], [True, 1], [1, 2.5], [1.5, 2.5], [1e300, 0.0])
    },
    "NumPy numbers": [np.int16(1), np.int16(2)],
    "tensors": [tf.constant(1), tf.constant(2)],
    "narrow array": np.ones(2, np.int16),
    "single precision": np.full(2, 0.1, np.float32),
    "strings": ["a", "b"],
}


def outcome(engine, computation, value):
    with engine.install():
        try:
            return np.asarray(computation(value))
        except TypeError:
            return None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "values"), [((), NUMBERS), ((2,), PAIRS)], ids=["numbers", "pairs"])
def test_as_the_native_engine_takes_them(dtype, shape, values, native_engine):
    @_tff.tensorflow_computation(_tff.TensorType(TYPES[dtype], shape))
    def same(x):
        return tf.identity(x)

    with inprocess() as engine:
        for name, value in values.items():
            expected, result = (outcome(each, same, value) for each in (native_engine, engine))
            assert (result is None) == (expected is None), f"{name}: {result}, not {expected}"
            if expected is not None:
                assert_same(result, expected)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (200, np.int8, r"argument: expected int8, not 200"),
        ([1, 2**40], np.int32, r"argument: expected int32\[\?\], not \[1, 1099511627776\]"),
        (-1, np.uint64, r"argument: expected uint64, not -1"),
        (1e300, np.float32, r"argument: expected float32, not 1e\+300"),
        (np.ones(2), np.float32, r"argument: expected float32\[\?\], not float64\[2\]"),
    ],
    ids=str,
)
def test_errors_name_the_number(value, dtype, message):
    with pytest.raises(TypeError, match=message):
        structures.from_python(value, _tff.TensorType(dtype, [None] if np.ndim(value) else []), "argument")


def test_tensors_of_the_type_are_passed_through():
    tensor = tf.ones([2, 3])
    assert structures.from_python(tensor, _tff.TensorType(np.float32, [2, 3]), "argument")[0] is tensor
