import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, stack, weights
from tff_pdp.algorithms.whole_models.pfa import build_pfa
from tff_pdp.algorithms.whole_models.public_only import build_public_only
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.privacy.plans.user import check_for_users

M = 4
SHAPES = {"kernel": (3, 2), "bias": (2,)}


def updates(seed=0):
    """Uploads of four silos: two tensors, by NumPy."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(M, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def tensors(arrays):
    return collections.OrderedDict((name, tf.constant(value, tf.float32)) for name, value in arrays.items())


def after_round(algorithm, state, rows, epsilons=(1.0, 2.0, 3.0, 4.0), present=(1, 1, 1, 1), few=None):
    mask = tf.constant(present, tf.float32)
    aggregates = {"update": {"rows": tensors(rows), "present": mask}}
    if "epsilon" in algorithm.released:
        aggregates["epsilon"] = {"rows": {"epsilon": tf.constant(epsilons, tf.float32)}, "present": mask}
    if "coordinates" in algorithm.released:
        zeros = {name: np.zeros([M, value.shape[0]]) for name, value in state["basis"].items()}
        aggregates["coordinates"] = {"rows": tensors(zeros if few is None else few), "present": mask}
    return algorithm.server_update(state, aggregates)


def first_state(algorithm):
    return algorithm.init_server(tensors({name: np.zeros(shape) for name, shape in SHAPES.items()}))


def known(liberal, **settings):
    """PFA in which `liberal` of the four silos, those with the largest epsilons, are liberal."""
    return build_pfa(num_clients=M, partition="known", liberal_share=liberal / M - 0.01, **settings)


def by_svd(rows, liberal, k, centred):
    """PFA's movement, silo by silo and tensor by tensor: the last `liberal` silos are liberal."""
    strict, members = slice(0, M - liberal), slice(M - liberal, M)
    moved = {}
    for name, value in rows.items():
        flat = value.reshape(M, -1).astype(np.float64)
        centre = flat[members].mean(axis=0) if liberal > 1 and centred else np.zeros(flat.shape[1])
        left, singular, _ = np.linalg.svd((flat[members] - centre).T, full_matrices=False)
        basis = left[:, :k][:, singular[:k] > 1e-6 * singular[0]]
        mean = flat[strict].mean(axis=0)
        projected = centre + basis @ (basis.T @ (mean - centre))
        total = (M - liberal) * projected + liberal * flat[members].mean(axis=0)
        moved[name] = (total / M).reshape(value.shape[1:])
    return moved


def assert_moved(state, expected, atol=1e-5):
    for name, value in expected.items():
        np.testing.assert_allclose(state["weights"][name], value, rtol=0, atol=atol)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("liberal", [1, 2, 3])
def test_it_is_the_projection_by_numpys_svd(liberal, k, centred):
    algorithm, rows = known(liberal, projection_dims=k, centre=centred), updates()
    after = after_round(algorithm, first_state(algorithm), rows)
    assert_moved(after, by_svd(rows, liberal, k, centred))
    np.testing.assert_array_equal(np.flatnonzero(after["is_liberal"]), np.arange(M - liberal, M))
    assert int(after["round"]) == 1


def test_one_subspace_of_all_weights_is_the_projection_of_joined_rows():
    rows = updates()
    algorithm = known(2, joint=True)
    after = after_round(algorithm, first_state(algorithm), rows)
    flat = {"joint": np.concatenate([rows["kernel"].reshape(M, -1), rows["bias"]], axis=1)}
    expected = by_svd(flat, 2, 1, True)["joint"]
    assert_moved(after, {"kernel": expected[:6].reshape(3, 2), "bias": expected[6:]})


def test_without_strict_or_liberal_silos_it_is_the_plain_mean():
    rows = updates()
    mean = {name: value.mean(axis=0) for name, value in rows.items()}
    for threshold in (0.5, 99.0):
        algorithm = build_pfa(num_clients=M, partition="known", liberal_epsilon=threshold)
        assert_moved(after_round(algorithm, first_state(algorithm), rows), mean, atol=1e-6)


def test_a_tensor_of_zeros_and_an_absent_silo_leave_everything_finite():
    rows = updates()
    rows["bias"][:] = 0
    # The third silo is liberal and absent: its row is zeros, and counts nowhere.
    rows["kernel"][2] = 0
    algorithm = known(2)
    after = after_round(algorithm, first_state(algorithm), rows, present=(1, 1, 0, 1))
    np.testing.assert_array_equal(after["weights"]["bias"], [0.0, 0.0])
    flat = rows["kernel"].reshape(M, -1)
    direction = flat[3] / np.linalg.norm(flat[3])
    projected = direction * (direction @ flat[:2].mean(axis=0))
    assert_moved(after, {"kernel": ((2 * projected + flat[3]) / 3).reshape(3, 2)})


@pytest.mark.parametrize("build", [build_pfa, build_public_only])
def test_the_warm_start_groups_by_norms_and_leaves_the_model_alone(build):
    algorithm = build(num_clients=M)
    rows = updates()
    rows = {name: value * np.array([20, 19, 1, 21]).reshape(M, *[1] * (value.ndim - 1)) for name, value in rows.items()}
    first = after_round(algorithm, first_state(algorithm), rows)
    np.testing.assert_array_equal(first["is_liberal"], [0, 0, 1, 0])
    assert all(not np.any(value) for value in first["weights"].values())
    # Other norms later do not change the groups.
    second = after_round(algorithm, first, updates(1))
    np.testing.assert_array_equal(second["is_liberal"], [0, 0, 1, 0])
    assert all(np.any(value) for value in second["weights"].values())


def test_liberal_silos_alone():
    algorithm, rows = build_public_only(num_clients=M, partition="known", liberal_share=0.5), updates()
    after = after_round(algorithm, first_state(algorithm), rows)
    assert_moved(after, {name: value[2:].mean(axis=0) for name, value in rows.items()}, atol=1e-6)
    # Both leave: the plain mean of those that are left.
    again = after_round(algorithm, after, rows, present=(1, 1, 0, 0))
    moved = {name: again["weights"][name] - after["weights"][name] for name in rows}
    assert_moved({"weights": moved}, {name: value[:2].mean(axis=0) for name, value in rows.items()}, atol=1e-6)


@pytest.mark.parametrize("joint", [False, True])
def test_pfa_plus_is_pfa_in_the_first_round_and_then_lifts_coordinates(joint):
    rows, later = updates(), updates(1)
    plain, plus = known(2, joint=joint), known(2, joint=joint, plus=True)
    first = after_round(plus, first_state(plus), rows)
    for name, value in after_round(plain, first_state(plain), rows)["weights"].items():
        np.testing.assert_array_equal(first["weights"][name], value)

    def flat(arrays):
        if not joint:
            return {name: value.reshape(M, -1) for name, value in arrays.items()}
        return {"joint": np.concatenate([value.reshape(M, -1) for value in arrays.values()], axis=1)}

    # Strict silos send coordinates in the first round's subspaces, and rows of exactly zero.
    few, expected = {}, {}
    for name, value in flat(later).items():
        basis, centre = first["basis"][name].numpy(), first["centre"][name].numpy()
        few[name] = np.concatenate([(value[:2] - centre) @ basis.T, np.zeros([2, 1])])
        lifted = centre + few[name][:2].mean(axis=0) @ basis
        expected[name] = (2 * lifted + value[2:].sum(axis=0)) / M
    sent = {name: np.concatenate([np.zeros_like(value[:2]), value[2:]]) for name, value in later.items()}
    second = after_round(plus, first, sent, few=few)
    moved = {name: second["weights"][name] - first["weights"][name] for name in SHAPES}
    if joint:
        expected = {"kernel": expected["joint"][:6], "bias": expected["joint"][6:]}
    expected = {name: value.reshape(SHAPES[name]) for name, value in expected.items()}
    assert_moved({"weights": moved}, expected, atol=1e-5)
    # The new subspaces are those of this round's liberal updates.
    for name, value in flat(later).items():
        np.testing.assert_allclose(second["centre"][name], value[2:].mean(axis=0), atol=1e-6)


def test_a_strict_silo_of_pfa_plus_sends_zeros_and_its_coordinates():
    algorithm = build_pfa(num_clients=2, partition="known", plus=True)
    message = {
        "weights": weights(1.0),
        "is_liberal": tf.constant([0.0, 1.0]),
        "basis": stack(1.0),
        "centre": weights(0.5),
        "has_subspace": tf.constant(1.0),
    }
    # w: 1 -> 2 by a step of 0.5 towards 3. Strict: 1 * (1 - 0.5).
    for index, has_subspace, row, few in ((0, 1.0, 0.0, 0.5), (1, 1.0, 1.0, 0.0), (0, 0.0, 1.0, 0.0)):
        given = hparams(learning_rate=0.5, client_index=index, budget_epsilon=2.0)
        message["has_subspace"] = tf.constant(has_subspace)
        released = algorithm.client_update(message, {}, NO_DATA, pull_to(3.0), given).released
        np.testing.assert_array_equal(released["update"]["w"], [row])
        np.testing.assert_array_equal(released["coordinates"]["w"], [few])
        assert float(released["epsilon"]["epsilon"]) == 2.0


def test_where_all_liberal_silos_leave_pfa_plus_asks_for_whole_updates_again():
    plus, rows = known(1, plus=True), updates()
    first = after_round(plus, first_state(plus), rows)
    assert float(first["has_subspace"]) == 1
    second = after_round(plus, first, {name: 0 * value for name, value in rows.items()}, present=(1, 1, 1, 0))
    assert float(second["has_subspace"]) == 0
    # Coordinates of zero are lifted to the old centre, which for one liberal silo is zero.
    assert_moved(second, first["weights"], atol=0)
    third = after_round(plus, second, rows, present=(1, 1, 1, 0))
    moved = {name: third["weights"][name] - second["weights"][name] for name in rows}
    assert_moved({"weights": moved}, {name: value[:3].mean(axis=0) for name, value in rows.items()}, atol=1e-6)


def test_the_first_round_may_be_of_liberal_silos_only():
    algorithm, rows = known(2, plus=True, first_round="liberal_only"), updates()
    first = after_round(algorithm, first_state(algorithm), rows)
    assert_moved(first, {name: value[2:].mean(axis=0) for name, value in rows.items()}, atol=1e-6)
    traffic = algorithm.traffic({**first, "weights": {"w": np.zeros(8)}}, 1)
    np.testing.assert_array_equal(traffic.uplink, [0, 0, 8, 8])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"projection_dims": 0}, r"algorithms.pfa.projection_dims must be a whole number of at least 1, not 0"),
        ({"projection_dims": 9}, "algorithms.pfa: projection_dims must be at most 8, the model's weights, not 9"),
        ({"first_round": "liberal_only"}, "algorithms.pfa: first_round liberal_only needs partition known or declared"),
        ({"partition": "declared"}, "algorithms.pfa: partition declared needs liberal_epsilon"),
        ({"budget_epsilon": 1.0}, "algorithms.pfa.budget_epsilon"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        build_algorithm("pfa", settings, num_clients=M, rounds=3, num_weights=8)


def test_more_dimensions_than_the_rank_are_allowed_up_to_the_models_weights():
    algorithm, _ = build_algorithm("pfa", {"projection_dims": 8}, num_clients=M, rounds=3, num_weights=8)
    state = first_state(algorithm)
    assert "basis" not in state


@pytest.mark.parametrize("name", ["pfa", "public_only"])
def test_users_cannot_be_grouped(name):
    algorithm, _ = build_algorithm(name, {}, num_clients=M, rounds=3)
    with pytest.raises(ConfigError, match=name):
        check_for_users(algorithm, "uniform")


def total(algorithm, liberal, rounds, silos, sizes=(7840, 10)):
    """Bytes of softmax regression on MNIST are four times these numbers of values: up and down."""
    state = {
        "weights": {str(place): np.zeros(size) for place, size in enumerate(sizes)},
        "is_liberal": np.arange(silos) < liberal,
    }
    found = [algorithm.traffic(state, number) for number in range(1, rounds + 1)]
    return sum(one.uplink.sum() for one in found), sum(one.downlink.sum() for one in found)


@pytest.mark.parametrize(
    ("silos", "liberal", "rounds", "partition", "saved", "times"),
    [
        (10, 1, 20, "known", 0.855, 1.43),
        (50, 5, 100, "known", 0.891, 1.45),
        (10, 1, 21, "by_norm", 0.814, None),
    ],
)
def test_pfa_plus_saves_uplink_and_costs_downlink(silos, liberal, rounds, partition, saved, times):
    up, down = total(build_pfa(num_clients=silos, partition=partition), liberal, rounds, silos)
    assert up == down == silos * rounds * 7850
    up_plus, down_plus = total(build_pfa(num_clients=silos, partition=partition, plus=True), liberal, rounds, silos)
    assert 1 - up_plus / up == pytest.approx(saved, abs=5e-4)
    if times:
        assert (up_plus + down_plus) / (up + down) == pytest.approx(times, abs=5e-3)


def test_liberal_silos_alone_are_the_only_ones_that_upload():
    up, down = total(build_public_only(num_clients=4), 1, 3, 4, sizes=(5,))
    # Everybody in the warm start.
    assert (up, down) == (4 * 5 + 2 * 5, 3 * 4 * 5)
