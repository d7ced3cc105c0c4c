"""Every registered method has the same results at a worker as in one process, to the bit.

A worker traces each method anew, and one worker stands for all: `test_equal_bits.py` has several, and their sums.
"""

import math

import numpy as np
import pytest

from tests.contract.contract_support import VARIANTS, assert_same, build
from tests.workers.contract_host import SETTING, ContractDirectory, ContractHost, setting_at_import
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.far_values import FarValues
from tff_pdp.engines.ray_workers.calls import ByValue, PoolOptions
from tff_pdp.engines.running import build_engine
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.processes.compose import client_data_type
from tff_pdp.testing.algorithms import MODEL, client_data, leaves, ready, run
from tff_pdp.training.checkpoint import Checkpoint, load_latest, save

pytestmark = [pytest.mark.timeout(600), pytest.mark.all]


@pytest.fixture(scope="module")
def directory():
    return ContractDirectory()


@pytest.fixture(scope="module")
def at_workers(engines, directory):
    """The engine whose worker computes all methods."""
    _, kept = engines
    for other in [*kept]:
        kept.pop(other).close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, "of the head")
        engine = build_engine(
            "ray",
            build_host=ContractHost,
            directory=directory,
            options=PoolOptions(num_workers=1),
            client_parallelism="loop",
        )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def here():
    """The engine of this process."""
    engine = build_engine("inprocess", device="cpu", client_parallelism="loop")
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=sorted({*ALGORITHMS.own, *VARIANTS}))
def built(request, directory):
    algorithm, process = build(request.param)
    directory.enter(request.param, process)
    return algorithm, process


def far(members):
    """Clients' examples as a description, as a training passes them: calls with a description are for workers."""
    values = ClientValues.from_members(client_data_type(MODEL), members)
    return FarValues(values.member_type, ByValue.of(values), np.arange(len(members)), values.select)


def results(process, algorithm, server, clients, given=lambda members: members):
    """All that a state after training is used for."""
    adapted = ready(process, algorithm, server, clients, data=given(client_data()))
    measured = process.evaluate(server, adapted, given(client_data(1)))
    return leaves((server, list(clients), list(adapted), list(measured)))


@pytest.fixture(scope="module")
def expected(built, here):
    """Computes three rounds in one process, to compare with."""
    algorithm, process = built
    with here.install():
        return results(process, algorithm, *run(process, algorithm, rounds=3))


def test_workers_give_the_bits_of_one_process(built, at_workers, expected):
    algorithm, process = built
    with at_workers.install():
        server, clients = run(process, algorithm, rounds=3, data=far(client_data()))
        assert isinstance(clients, FarValues), "the round was computed in this process"
        assert_same(results(process, algorithm, server, clients, far), expected)


def test_a_saved_state_goes_on_at_workers_to_the_same_bits(built, at_workers, expected, tmp_path):
    algorithm, process = built
    with at_workers.install():
        server, clients = run(process, algorithm, rounds=1, data=far(client_data()))
        state = Checkpoint(
            round_number=1,
            server_state=server,
            client_ids=tuple(map(str, range(len(clients)))),
            client_states=clients,
            ledger=None,
            run_key=RunKey.from_entropy(),
            config_hash="hash",
        )
        save(tmp_path, state)
        loaded = load_latest(tmp_path)
        start = loaded.server_state, loaded.client_states
        whole = run(process, algorithm, rounds=(2, 3), start=start, data=far(client_data()))
        assert_same(results(process, algorithm, *whole, far), expected)


def test_padding_may_hold_anything_at_workers(built, at_workers, expected):
    algorithm, process = built
    dirty = far(client_data(padding=math.inf, padding_label=2))
    with at_workers.install():
        trained = run(process, algorithm, rounds=3, data=dirty)
        assert_same(results(process, algorithm, *trained, far), expected)


def test_workers_have_the_heads_settings_before_they_import_anything_else(at_workers):
    """Libraries read their settings once, when they are imported."""
    assert at_workers.pool.facts(setting_at_import) == "of the head"
