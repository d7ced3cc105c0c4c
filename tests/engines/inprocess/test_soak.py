"""Many rounds with many clients: memory, traced functions and processes stay as they are.

Each run has a process to itself: what other tests leave in an allocator would drown what is measured here. TensorFlow
2.14 loses 16 bytes per eager tensor on Python 3.11, 11 MB in 30,000 client calls of `loop`: that is within the bound,
one lost copy of a client's tensors per call is not. The short run finds what grows by a round, or by a megabyte each.
"""

import collections
import contextlib
import gc
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

from tests.engines.inprocess.inprocess_support import num_traced
from tests.places import ROOT
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.running import build_engine
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.processes.compose import client_data_type, client_params_columns, client_params_type, compose

WARM_UP = 20
MODEL = build_mlp((8,), 3, (16,))


def resident_bytes():
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def client_data(clients):
    rng = np.random.default_rng(0)
    members = [
        collections.OrderedDict(
            x=rng.normal(size=(20, 8)).astype(np.float32), y=rng.integers(0, 3, 20), num_examples=np.int32(20)
        )
        for _ in range(clients)
    ]
    return ClientValues.from_members(client_data_type(MODEL), members)


def client_params(algorithm, estimator, round_number, clients):
    key = RunKey.from_test_seed(0)
    columns = client_params_columns(
        algorithm,
        estimator,
        mechanism={"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling_rate": 0.25, "expected_batch_size": 5.0},
        hparams={},
        seeds=np.stack([key.client_seed(round_number, str(client)) for client in range(clients)]),
    )
    return ClientValues.from_columns(client_params_type(algorithm, estimator), columns)


def soak(client_parallelism, clients, rounds):
    algorithm, estimator = ALGORITHMS.find("mr_mtl")(), build_dp_sgd(MODEL)
    process = compose(algorithm, MODEL, estimator=estimator)
    threads = threading.active_count()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = build_engine("inprocess", device="cpu", client_parallelism=client_parallelism)
    with contextlib.closing(engine), engine.install():
        data = client_data(clients)
        server = process.initialize()
        states = [process.init_client(server)] * clients
        for round_number in range(1, rounds + 1):
            params = client_params(algorithm, estimator, round_number, clients)
            server, states, _ = process.next(server, states, data, params)
            if round_number == WARM_UP:
                resident, traced = resident_bytes(), num_traced(engine)
        growth = resident_bytes() - resident
        assert growth <= resident * 0.02, f"{growth:,} bytes more than {resident:,}"
        assert num_traced(engine) == traced
    assert threading.active_count() <= threads
    assert {child.pid for child in psutil.Process().children(recursive=True)} == children


@pytest.mark.parametrize(
    ("client_parallelism", "clients", "rounds"),
    [
        pytest.param("loop", 10, 50, id="loop-short"),
        *(pytest.param(name, 100, 300, marks=pytest.mark.all, id=f"{name}-long") for name in ("vectorized", "loop")),
    ],
)
def test_a_long_run_grows_in_nothing(client_parallelism, clients, rounds):
    command = [sys.executable, "-m", "tests.engines.inprocess.test_soak", client_parallelism, str(clients), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    soak(sys.argv[1], *map(int, sys.argv[2:]))
