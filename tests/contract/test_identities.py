"""Identities between methods: no data, no tolerance."""

import numpy as np
import pytest

from tests.contract.contract_support import assert_close, assert_same, build, run


@pytest.fixture(scope="module")
def engine(engines):
    """One is enough here: that all give the same is a test of its own."""
    return engines["loop"]


def personal(name, arguments=None, **params):
    algorithm, process = build(name, **(arguments or {}))
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
    with engine.install():
        shared = personal("fed_avg", rounds=1)[0]
        alone = personal("local_only", rounds=1)
    for name, array in shared.items():
        np.testing.assert_allclose(array, np.mean([one[name] for one in alone], axis=0), atol=1e-6)


def test_one_round_of_ditto_trains_the_shared_model_as_fed_avg_does(engine):
    with engine.install():
        (ditto, process), (fed_avg, shared) = build("ditto"), build("fed_avg")
        # Later rounds draw other batches and noise: a round of Ditto has twice as many gradients.
        assert_close(run(process, ditto, 1)[0]["algorithm"], run(shared, fed_avg, 1)[0]["algorithm"])


def test_without_noise_dittos_shared_model_is_fed_avgs(engine):
    exact = {"noise_multiplier": 0.0, "sampling_rate": 1.0}
    with engine.install():
        (ditto, process), (fed_avg, shared) = build("ditto"), build("fed_avg")
        assert_close(run(process, ditto, **exact)[0]["algorithm"], run(shared, fed_avg, **exact)[0]["algorithm"])


def test_without_a_pull_mocha_is_local_training(engine):
    with engine.install():
        assert_close(personal("mocha", prox_weight=0.0), personal("local_only"))


def test_fine_tuning_that_never_begins_is_fed_avg(engine):
    with engine.install():
        assert_same(personal("finetune", {"federated_fraction": 1.0}), personal("fed_avg"))


def test_fine_tuning_that_begins_at_once_is_local_training(engine):
    with engine.install():
        assert_same(personal("finetune", {"federated_fraction": 0.0}), personal("local_only"))


@pytest.mark.parametrize(
    ("clustered", "plain"),
    [
        ("ifca", "fed_avg"),
        ("ifca_fed_avg", "fed_avg"),
        ("ifca_finetune", "finetune"),
        ("ifca_mr_mtl", "mr_mtl"),
    ],
)
def test_one_cluster_is_no_cluster(clustered, plain, engine):
    arguments = {"num_clusters": 1}
    if clustered == "ifca_mr_mtl":
        arguments["selection_fraction"] = 0.0
    with engine.install():
        assert_close(personal(clustered, arguments), personal(plain))


def test_local_training_in_clusters_that_were_never_formed_is_local_training(engine):
    with engine.install():
        assert_same(personal("ifca_local", {"num_clusters": 1, "selection_fraction": 0.0}), personal("local_only"))


def test_clusters_models_are_the_means_of_their_members(engine):
    """IFCA, then MR-MTL: also across the round in which clustering ends."""
    algorithm, process = build("ifca_mr_mtl", num_clusters=2, selection_fraction=0.3)
    with engine.install():
        server, clients = run(process, algorithm)
    clusters = np.array([client["cluster"] for client in clients])
    for name, centroids in server["algorithm"]["centroids"].items():
        for cluster in set(clusters.tolist()):
            members = [client["weights"][name] for client in clients if client["cluster"] == cluster]
            np.testing.assert_allclose(centroids[cluster], np.mean(members, axis=0), atol=1e-5)


def test_clusters_stay_once_selection_has_ended(engine):
    algorithm, process = build("ifca_fed_avg", num_clusters=3, selection_fraction=0.3)
    with engine.install():
        server, clients = run(process, algorithm, 1)
        formed = [int(client["cluster"]) for client in clients]
        _, clients = run(process, algorithm, (2, 3), start=(server, list(clients)))
    assert [int(client["cluster"]) for client in clients] == formed
