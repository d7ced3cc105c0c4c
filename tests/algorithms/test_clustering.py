import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, stack, weights
from tff_pdp.algorithms.clustering import init_clusters
from tff_pdp.algorithms.whole_models.ifca import (
    build_ifca,
    build_ifca_fed_avg,
    build_ifca_finetune,
    build_ifca_local,
    build_ifca_mr_mtl,
)

CENTROIDS = (1.0, 3.0)


def update(algorithm, done, selected, cluster=0, own=2.0, is_own=False, **values):
    """A client's round after so many: one step with rate 0.5 towards 5."""
    message = {"centroids": stack(*CENTROIDS), "round": tf.constant(done)}
    state = {"weights": weights(own), "cluster": tf.constant(cluster), "is_own": tf.constant(is_own)}
    given = hparams(learning_rate=0.5, selected=selected, **values)
    return algorithm.client_update(message, state, NO_DATA, pull_to(5.0), given)


def flat(released):
    return released["movement"]["w"].numpy().ravel().tolist(), released["members"]["count"].numpy().tolist()


def test_ifca_trains_the_selected_clusters_model():
    result = update(build_ifca(rounds=4, num_clusters=2), done=3, selected=1)
    # 3 -> 3 - 0.5 * (3 - 5) = 4
    assert int(result.state["cluster"]) == 1
    assert flat(result.released) == ([0.0, 1.0], [0.0, 1.0])


def test_without_a_selection_a_client_stays_in_its_cluster():
    result = update(build_ifca_finetune(rounds=4, num_clusters=2), done=1, selected=-1, cluster=1)
    assert int(result.state["cluster"]) == 1
    assert flat(result.released) == ([0.0, 1.0], [0.0, 1.0])


def test_local_training_starts_from_the_cluster_and_releases_nothing():
    algorithm = build_ifca_local(rounds=4, num_clusters=2, selection_fraction=0.25)
    assert algorithm.selection_rounds == 1
    first = update(algorithm, 1, selected=-1, cluster=1)
    later = update(algorithm, 2, selected=-1, cluster=1, is_own=True)
    assert first.state["weights"]["w"].numpy().tolist() == [4.0]
    assert later.state["weights"]["w"].numpy().tolist() == [3.5]
    assert flat(first.released) == flat(later.released) == ([0.0, 0.0], [0.0, 0.0])
    assert bool(first.state["is_own"]) and bool(later.state["is_own"])


def test_mr_mtl_first_trains_the_clusters_model_and_then_its_own_with_a_pull_to_it():
    algorithm = build_ifca_mr_mtl(rounds=4, num_clusters=2, selection_fraction=0.25)
    clustering = update(algorithm, done=0, selected=1, prox_weight=2.0)
    assert clustering.state["weights"]["w"].numpy().tolist() == [4.0]
    assert flat(clustering.released) == ([0.0, 1.0], [0.0, 1.0])
    # 2 -> 2 - 0.5 * ((2 - 5) + 2 * (2 - 3)) = 4.5, a movement of 2.5 from its own weights.
    after = update(algorithm, done=1, selected=-1, cluster=1, prox_weight=2.0)
    assert after.state["weights"]["w"].numpy().tolist() == [4.5]
    assert flat(after.released) == ([0.0, 2.5], [0.0, 1.0])


@pytest.mark.parametrize(
    ("build", "arguments", "is_clusters"),
    [
        (build_ifca, {}, True),
        (build_ifca_fed_avg, {}, True),
        (build_ifca_finetune, {"federated_fraction": 1.0}, True),
        (build_ifca_finetune, {}, False),
        (build_ifca_local, {}, False),
        (build_ifca_mr_mtl, {}, False),
    ],
)
def test_a_method_says_whether_a_clients_model_is_its_clusters_in_the_end(build, arguments, is_clusters):
    algorithm = build(rounds=4, num_clusters=2, **arguments)
    last = update(algorithm, done=3, selected=-1, cluster=1, prox_weight=2.0)
    model = algorithm.personalise({"centroids": stack(*CENTROIDS), "round": tf.constant(4)}, last.state)
    assert (float(model["w"]) in CENTROIDS) == algorithm.export.serves_candidates == is_clusters


def server_update(algorithm, done, members):
    """The clusters after so many rounds and one more, in which the first two moved by 3 and 1 in all."""
    state = {"centroids": stack(1.0, 3.0, 7.0), "round": tf.constant(done)}
    aggregates = {"movement": stack(3.0, 1.0, 0.0), "members": {"count": tf.constant(members)}}
    after = algorithm.server_update(state, aggregates)
    assert int(after["round"]) == done + 1
    return after["centroids"]["w"].numpy().ravel()


def test_the_server_moves_each_cluster_by_its_members_mean_and_leaves_an_empty_one():
    algorithm = build_ifca_mr_mtl(rounds=4, num_clusters=3, selection_fraction=0.5)
    assert server_update(algorithm, done=2, members=[2.0, 1.0, 0.0]).tolist() == [2.5, 4.0, 7.0]


@pytest.mark.parametrize("members", [[2.0, 1.0, 0.0], [0.5, 0.25, 0.0]])
def test_while_clients_select_an_empty_cluster_starts_again_beside_the_largest(members):
    algorithm = build_ifca_mr_mtl(rounds=4, num_clusters=3, selection_fraction=0.5, init_stddev=0.01)
    first, second, third = server_update(algorithm, done=1, members=members)
    assert (first, second) == (1.0 + 3.0 / members[0], 3.0 + 1.0 / members[1])
    assert 0 < abs(third - first) < 0.05
    # Two that start again in different rounds do so differently.
    assert server_update(algorithm, done=0, members=members)[2] != third


def test_without_any_member_all_clusters_keep_their_models():
    algorithm = build_ifca(rounds=4, num_clusters=3)
    assert server_update(algorithm, done=1, members=[0.0, 0.0, 0.0]).tolist() == [1.0, 3.0, 7.0]


@pytest.mark.parametrize("num_clusters", [1, 3])
def test_clusters_begin_near_each_other_and_the_first_where_it_was_asked_to(num_clusters):
    initial = {"kernel": tf.ones([50, 4]), "bias": tf.zeros([4])}
    state = init_clusters(initial, num_clusters, 0.1)
    for name, value in initial.items():
        centroids = state["centroids"][name].numpy()
        np.testing.assert_array_equal(centroids[0], value)
        assert centroids.shape == (num_clusters, *value.shape)
    if num_clusters > 1:
        others = state["centroids"]["kernel"].numpy()[1:] - 1.0
        assert 0.08 < others.std() < 0.12
        assert not np.array_equal(others[0], others[1])
    assert int(state["round"]) == 0
