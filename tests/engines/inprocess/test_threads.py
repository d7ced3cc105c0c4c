"""Several engines and threads on the same clients' values at once."""

import concurrent.futures

import numpy as np
import pytest

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import VECTOR, inprocess
from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.inprocess.clients import ClientWork

pytestmark = pytest.mark.timeout(120)

COLUMNS = np.arange(3 * 40, dtype=np.float32).reshape(40, 3)


@_tff.federated_computation(_tff.at_clients(VECTOR))
def total(values):
    return _tff.federated_sum(values)


@pytest.mark.parametrize(
    ("first", "second"), [(("vectorized", 7), ("vectorized", 20)), (("loop", 7), ("vectorized", 20))], ids=str
)
def test_engines_that_share_values_do_not_disturb_each_other(first, second):
    values = ClientValues.from_columns(VECTOR, COLUMNS)

    def call_often(mode, clients_per_call):
        with inprocess(mode, clients_per_call=clients_per_call) as engine, engine.install():
            return [total(values).numpy() for _ in range(100)]

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call_often, *options) for options in (first, second)]
        for result in (result for call in calls for result in call.result()):
            assert_same(result, COLUMNS.sum(axis=0))


def test_a_call_goes_on_with_the_arrangement_it_began_with(mode, monkeypatch):
    values = ClientValues.from_columns(VECTOR, COLUMNS[:4])
    run = ClientWork.run

    def run_on_rearranged(work, chunks, sums):
        values.arrange([np.array([0, 2, 1]), np.array([3])])
        return run(work, chunks, sums)

    monkeypatch.setattr(ClientWork, "run", run_on_rearranged)
    with inprocess(mode, clients_per_call=2) as engine, engine.install():
        assert_same(total(values).numpy(), COLUMNS[:4].sum(axis=0))


def test_the_next_call_finds_the_values_arranged():
    values = ClientValues.from_members(VECTOR, list(COLUMNS[:5]))
    kept = []
    with inprocess("vectorized", clients_per_call=2) as engine, engine.install():
        for _ in range(2):
            total(values)
            kept.append(values.groups)
    assert [len(group.indices) for group in kept[0]] == [2, 2, 1]
    assert all(before is after for before, after in zip(*kept, strict=True))
