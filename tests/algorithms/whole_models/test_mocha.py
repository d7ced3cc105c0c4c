import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, stack, weights
from tests.rounding import gamma
from tff_pdp.algorithms.whole_models.mocha import build_mocha, relations_between

CLIENTS, WEIGHTS = 3, 5
# Of the products of the clients' rows, sums over the weights; of their eigenvalues and of how far from orthonormal
# their eigenvectors are, p(n) u by the LAPACK Users' Guide (4.7), with n^2 for its "modestly growing" p; and of the
# division by the trace and the product of three matrices at the end.
ROUNDING = gamma(WEIGHTS + CLIENTS**2 + 3 * CLIENTS)


def test_a_round_by_hand():
    # With relations [[2, -1], [-1, 2]] and the other's row at 4, client 0 at 1 feels 0.5 * (2 * 1 - 1 * 4) = -1 and
    # the gradient 1 - 5 = -4: 1 -> 1 + 0.5 * 5 = 3.5.
    algorithm = build_mocha(num_clients=2)
    message = {"rows": stack(1.0, 4.0), "relations": tf.constant([[2.0, -1.0], [-1.0, 2.0]])}
    result = algorithm.client_update(
        message,
        {"weights": weights(1.0)},
        NO_DATA,
        pull_to(5.0),
        hparams(learning_rate=0.5, prox_weight=0.5, client_index=0),
    )
    np.testing.assert_array_equal(result.state["weights"]["w"], [3.5])
    np.testing.assert_array_equal(result.released["row"]["w"], [3.5])


def test_a_client_that_has_left_keeps_its_row():
    algorithm = build_mocha(num_clients=2)
    state = {"rows": stack(1.0, 4.0), "relations": tf.eye(2)}
    after = algorithm.server_update(state, {"row": {"rows": stack(0.0, 6.0), "present": tf.constant([0.0, 1.0])}})
    np.testing.assert_array_equal(after["rows"]["w"], [[1.0], [6.0]])


def test_relations_are_the_scaled_inverse_of_the_root_of_the_rows_products():
    rows = np.random.default_rng(0).normal(size=(CLIENTS, WEIGHTS)).astype(np.float32)
    found = relations_between({"w": tf.constant(rows)}, smallest_share=1e-6, paper_covariance=False).numpy()
    # W W^T = U S^2 U^T, so its root is U S U^T.
    left, singular, _ = np.linalg.svd(rows.astype(np.float64), full_matrices=False)
    inverse = left @ np.diag(1 / singular) @ left.T
    scale = CLIENTS / np.trace(inverse)
    # The function is operator monotone: a change of W W^T by d moves it by at most d times its slope at the smallest
    # eigenvalue, lambda^-3/2 / 2; by the same change in the trace all of it moves by as much again, and no more.
    moved = scale * singular.min() ** -3 / 2 * ROUNDING * singular.max() ** 2
    np.testing.assert_allclose(found, inverse * scale, atol=2 * moved + ROUNDING * scale / singular.min())


def test_the_papers_relations_have_trace_one():
    rows = np.random.default_rng(0).normal(size=(CLIENTS, WEIGHTS)).astype(np.float32)
    found = relations_between({"w": tf.constant(rows)}, smallest_share=1e-6, paper_covariance=True).numpy()
    assert np.trace(found) == pytest.approx(1.0, rel=ROUNDING)


@pytest.mark.parametrize("paper_covariance", [False, True])
def test_similar_clients_are_pulled_together_but_pushed_apart_by_the_papers_form(paper_covariance):
    rows = {"w": tf.constant([[1.0, 0.1], [1.0, -0.1], [-0.3, 1.0]])}
    relations = relations_between(rows, smallest_share=0.01, paper_covariance=paper_covariance).numpy()
    assert (relations[0, 1] > 0) == paper_covariance


def test_rows_of_zeros_are_all_alike():
    relations = relations_between({"w": tf.zeros([CLIENTS, 2])}, smallest_share=0.1, paper_covariance=False)
    np.testing.assert_allclose(relations, np.eye(CLIENTS), atol=ROUNDING)
