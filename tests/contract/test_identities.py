"""Identities between methods: no data, no tolerance."""

import numpy as np

from tests.contract.contract_support import MODEL, SIZES, assert_same, client_params, run
from tff_pdp.privacy.dp_sgd import build_dp_sgd
from tff_pdp.processes.compose import compose
from tff_pdp.registry import ALGORITHMS


def build(name):
    algorithm = ALGORITHMS[name]()
    return algorithm, compose(algorithm, MODEL, estimator=build_dp_sgd(MODEL))


def personal(name, **params):
    algorithm, process = build(name)
    server, clients = run(process, algorithm, **params)
    return list(process.personalise(server, clients))


def test_mr_mtl_without_pull_is_local_training(engine):
    with engine.install():
        assert_same(personal("mr_mtl", prox_weight=0.0), personal("local_only"))


def test_mr_mtl_server_state_is_the_mean_of_the_clients(engine):
    algorithm, process = build("mr_mtl")
    with engine.install():
        server, clients = run(process, algorithm)
    for name, mean in server["algorithm"]["mean"].items():
        np.testing.assert_allclose(mean, np.mean([c["weights"][name] for c in clients], axis=0), atol=1e-6)


def test_one_round_of_fed_avg_is_the_mean_of_local_training(engine):
    local = ALGORITHMS["local_only"]()
    with engine.install():
        shared = personal("fed_avg", rounds=1)[0]
        alone = personal("local_only", rounds=1)
    assert len(client_params(local, 1)) == len(SIZES)
    for name, array in shared.items():
        np.testing.assert_allclose(array, np.mean([one[name] for one in alone], axis=0), atol=1e-6)
