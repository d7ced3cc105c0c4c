"""Identities between methods, to the last bit or, where other sums lead there, up to their rounding."""

import numpy as np
import pytest
import tensorflow as tf

from tests.contract.contract_support import assert_close, assert_same, build
from tests.rounding import gamma
from tests.tiers import parameters
from tff_pdp.testing.algorithms import MODEL, ROUNDS, SIZES, leaves, run


@pytest.fixture(scope="module")
def engine(engines):
    """One is enough here: that all give the same is a test of its own."""
    return engines["loop"]


def personal(name, arguments=None, **params):
    algorithm, process = build(name, **(arguments or {}))
    server, clients = run(process, algorithm, **params)
    return list(process.personalise(server, clients))


def assert_mean(mean, members):
    """Fails where a mean of clients is further from the one in float64 than its roundings explain.

    A mean comes as the old one and the mean update: a difference, as many products and sums as there are clients, a
    quotient and a sum, of numbers no larger than twice the largest weight; once a round, as what is moved stays moved.
    """
    members = np.stack(members).astype(np.float64)
    bound = ROUNDS * gamma(2 * len(SIZES) + 3) * 2 * np.abs(members).max()
    np.testing.assert_allclose(mean, members.mean(axis=0), rtol=0, atol=bound)


def test_mr_mtl_without_pull_is_local_training(engine):
    with engine.install():
        assert_same(personal("mr_mtl", prox_weight=0.0), personal("local_only"))


def test_mr_mtl_server_state_is_the_mean_of_the_clients(engine):
    algorithm, process = build("mr_mtl")
    with engine.install():
        server, clients = run(process, algorithm)
    for name, mean in server["algorithm"]["mean"].items():
        assert_mean(mean, [client["weights"][name] for client in clients])


def test_one_round_of_fed_avg_is_the_mean_of_local_training(engine):
    with engine.install():
        shared = personal("fed_avg", rounds=1)[0]
        alone = personal("local_only", rounds=1)
    for name, array in shared.items():
        assert_mean(array, [one[name] for one in alone])


def test_one_round_of_ditto_trains_the_shared_model_as_fed_avg_does(engine):
    with engine.install():
        (ditto, process), (fed_avg, shared) = build("ditto"), build("fed_avg")
        # Later rounds draw other batches and noise: a round of Ditto has twice as many gradients.
        assert_close(run(process, ditto, 1)[0]["algorithm"], run(shared, fed_avg, 1)[0]["algorithm"])


@pytest.mark.parametrize("name", parameters(["ditto", "apfl", "fed_nova"], test=["apfl"]))
def test_without_noise_the_shared_model_is_fed_avgs(engine, name):
    """Whatever clients learn beside it, and where all take as many steps."""
    exact = {"noise_multiplier": 0.0, "sampling_rate": 1.0}
    with engine.install():
        (algorithm, process), (fed_avg, shared) = build(name), build("fed_avg")
        assert_close(run(process, algorithm, **exact)[0]["algorithm"], run(shared, fed_avg, **exact)[0]["algorithm"])


def test_with_a_mixture_of_nothing_but_its_own_weights_apfl_is_local_training(engine):
    exact = {"noise_multiplier": 0.0, "sampling_rate": 1.0}
    with engine.install():
        assert_close(personal("apfl", mixture=1.0, **exact), personal("local_only", **exact))


def test_without_a_pull_mocha_is_local_training(engine):
    with engine.install():
        assert_close(personal("mocha", prox_weight=0.0), personal("local_only"))


@pytest.mark.all
def test_fine_tuning_that_never_begins_is_fed_avg(engine):
    with engine.install():
        assert_same(personal("finetune", {"federated_fraction": 1.0}), personal("fed_avg"))


def test_fine_tuning_that_begins_at_once_is_local_training(engine):
    with engine.install():
        assert_same(personal("finetune", {"federated_fraction": 0.0}), personal("local_only"))


@pytest.mark.parametrize(
    ("clustered", "plain"),
    parameters(
        [("ifca", "fed_avg"), ("ifca_fed_avg", "fed_avg"), ("ifca_finetune", "finetune"), ("ifca_mr_mtl", "mr_mtl")],
        test=[("ifca_mr_mtl", "mr_mtl")],
    ),
)
def test_one_cluster_is_no_cluster(clustered, plain, engine):
    arguments = {"num_clusters": 1}
    if clustered == "ifca_mr_mtl":
        arguments["selection_fraction"] = 0.0
    with engine.install():
        assert_close(personal(clustered, arguments), personal(plain))


@pytest.mark.all
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
            assert_mean(centroids[cluster], members)


@pytest.mark.all
def test_clusters_stay_once_selection_has_ended(engine):
    algorithm, process = build("ifca_fed_avg", num_clusters=3, selection_fraction=0.3)
    with engine.install():
        server, clients = run(process, algorithm, 1)
        formed = [int(client["cluster"]) for client in clients]
        _, clients = run(process, algorithm, (2, 3), start=(server, list(clients)))
    assert [int(client["cluster"]) for client in clients] == formed


@pytest.fixture(params=["loop", pytest.param("native", marks=pytest.mark.all)])
def own_engine(request, engines):
    """Both that compute clients one by one."""
    return engines[request.param]


def trained(name, rounds=3, params=(), **arguments):
    """The algorithm's server state and the clients' states, after rounds of clients with different numbers of steps."""
    algorithm, process = build(name, **arguments)
    steps = {**dict.fromkeys(algorithm.step_hparams, (2, 3, 1, 2)), "head_steps": (1, 2, 3, 2)}
    given = {key: value for key, value in {**steps, **dict(params)}.items() if key in algorithm.hparams}
    server, clients = run(process, algorithm, rounds, **given)
    return server["algorithm"], list(clients)


def test_dp_fed_avg_with_tuned_heads_trains_as_fed_avg_does(own_engine):
    with own_engine.install():
        assert_same(trained("dp_fed_avg_ft")[0]["weights"], trained("fed_avg")[0]["weights"])


def test_pp_sgd_with_frozen_own_parts_is_dp_fed_avg(own_engine):
    with own_engine.install():
        server, clients = trained("pp_sgd", params={"personal_rate": 0.0})
        assert_same(server, trained("dp_fed_avg_ft")[0])
        moved, own = trained("pp_sgd")
    assert_same(clients, [tf.nest.map_structure(np.zeros_like, client) for client in clients])
    # With own parts that move it is not.
    assert all(np.any(leaf) for client in own for leaf in leaves(client))
    assert not any(np.array_equal(*pair) for pair in zip(leaves(server), leaves(moved), strict=True))


def test_pmtl_without_a_pull_is_dp_fed_avg(own_engine):
    with own_engine.install():
        assert_same(trained("pmtl_ft", params={"prox_weight": 0.0})[0], trained("dp_fed_avg_ft")[0])


def test_dsu_with_all_weights_and_no_penalty_is_centaur(own_engine):
    shared = {"local_momentum": 0.5, "server_optimizer": "adam", "server_learning_rate": 0.5}
    with own_engine.install():
        centaur = trained("centaur", **shared)
        assert_same(trained("dp_pfed_dsu", sparsity=1.0, norm_weight=0.0, **shared), centaur)


@pytest.mark.all
def test_dsu_with_masks_of_all_weights_at_clients_is_centaur(engine):
    with engine.install():
        dsu = trained("dp_pfed_dsu", sparsity=1.0, norm_weight=0.0, mask_source="client")
        assert_same(dsu, trained("centaur"))


def test_fed_rep_is_centaur(engine):
    with engine.install():
        assert_same(trained("fed_rep"), trained("centaur"))


def test_hypernetworks_with_privacy_and_without_are_the_same_computation(engine):
    sizes = {"hidden_units": (16,)}
    with engine.install():
        server, clients = trained("udp_hypernet", **sizes)
        assert_same((server, clients), trained("hypernet", **sizes))
    # They did learn: descriptors are no longer the same.
    assert len({client["descriptor"].tobytes() for client in clients}) == len(clients)


@pytest.mark.parametrize("name", ["centaur", "fed_per"])
def test_the_servers_head_is_the_public_initial_one(name, engine):
    with engine.install():
        server, clients = trained(name)
    for weight in MODEL.head:
        np.testing.assert_array_equal(server["weights"][weight], MODEL.init(0)[weight])
        assert all(np.any(client["head"][weight] != MODEL.init(0)[weight]) for client in clients)
    assert any(np.any(server["weights"][weight] != value) for weight, value in MODEL.init(0).items())


@pytest.mark.all
def test_the_body_outside_of_the_servers_masks_stays_as_it_is(engine):
    """Whatever gradients and their noise are."""
    with engine.install():
        server, _ = trained("dp_pfed_dsu", rounds=1, sparsity=0.25)
    kernel, initial = server["weights"]["dense_0/kernel"], MODEL.init(0)["dense_0/kernel"]
    largest = np.abs(initial) >= np.sort(np.abs(initial), axis=None)[-initial.size // 4]
    np.testing.assert_array_equal(kernel != initial, largest)
    assert np.all(server["weights"]["dense_0/bias"] != MODEL.init(0)["dense_0/bias"])
