"""Values that stay at workers: nothing comes here before somebody reads it."""

import numpy as np
import pytest

from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.far_values import FarValues, ResultValues
from tff_pdp.engines.inprocess.parts import divide

ROWS = _tff.to_type(_tff.TensorType(np.float32, [None]))
NUMBER = _tff.to_type(_tff.TensorType(np.float32))


class Recipe:
    is_lasting = False

    def load(self, host, rows, member_type):
        raise AssertionError("only workers load")


def never(rows):
    raise AssertionError(f"the values of {len(rows)} clients came here")


def far(sizes, bring=never):
    return FarValues(ROWS, Recipe(), np.arange(len(sizes)), bring, [((size,),) for size in sizes])


@pytest.mark.parametrize("mode", ["loop", "vectorized"])
def test_clients_are_divided_by_what_is_known_of_them(mode):
    near = {"x": ClientValues.from_members(ROWS, [np.zeros(size, np.float32) for size in (1, 2, 1)])}
    one, other = divide({"x": far([1, 2, 1])}, mode, 4), divide(near, mode, 4)
    assert [[chunk.tolist() for chunk in part] for part in one] == [
        [chunk.tolist() for chunk in part] for part in other
    ]


def test_selecting_and_retyping_bring_nothing():
    values = far([1, 2, 3]).select([2, 0]).with_type(ROWS)
    assert values.rows.tolist() == [2, 0]
    assert values.shapes() == [((3,),), ((1,),)]
    assert len(values) == 2


def test_results_keep_their_way_to_the_workers_under_another_type():
    kept = []
    results = ResultValues(NUMBER, np.arange(2), bring=never, keep=lambda writer: kept.append(writer) or [])
    typed = results.with_type(NUMBER)
    assert isinstance(typed, ResultValues)
    typed.keep("writer")
    assert kept == ["writer"]


def test_reading_brings_the_values_once():
    brought = []

    def bring(rows):
        brought.append(rows.tolist())
        return ClientValues.from_columns(NUMBER, 10 * rows.astype(np.float32))

    values = FarValues(NUMBER, Recipe(), np.array([3, 1]), bring)
    assert [float(value) for value in values] == [30.0, 10.0]
    assert values.columns().tolist() == [30.0, 10.0]
    assert brought == [[3, 1]]
