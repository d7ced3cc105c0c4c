"""Mocha in its primal form (Smith et al., "Federated Multi-Task Learning", NeurIPS 2017).

Clients' weights are the rows of a matrix W, pulled to each other by `lambda / 2 * tr(W^T Omega W)`. Omega, the matrix
of relations, is learned, too. It is the inverse of `Sigma = (W W^T)^(1/2)`, scaled to a mean eigenvalue of one, so that
lambda has about the same effect as in MR-MTL. All rows are private when they reach the server, so learning relations
from them costs nothing.
"""

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, SET_BY_RUNTIME, prox_weight
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.models.base import Weights
from tff_pdp.settings import Fraction


def build_mocha(*, num_clients: int, smallest_share: Fraction = 0.1, paper_covariance: bool = False) -> Algorithm:
    """Builds Mocha. Server state: all clients' weights as the rows of W, and their relations `[num_clients,
    num_clients]`. Client state: the client's row of W. Released: this row.

    Args:
      num_clients: number of clients, each with a `client_index` of its own.
      smallest_share: lower bound of the eigenvalues of Sigma = (W W^T)^(1/2), relative to their mean, before Sigma is
        inverted.
      paper_covariance: use Sigma, scaled to trace one, in place of Omega, as the MR-MTL paper's released code does;
        similar clients are then pushed apart.
    """

    def pull_of_others(broadcast, index):
        """Returns the anchor of the others' pull, and its strength: the gradient is `strength * (w - anchor)`."""
        strengths = tf.gather(broadcast["relations"], index)
        own = tf.gather(strengths, index)
        others = strengths * (1.0 - tf.one_hot(index, num_clients))
        # The diagonal of a positive definite matrix is positive.
        anchor = map_weights(lambda rows: -tf.tensordot(others, rows, 1) / own, broadcast["rows"])
        return anchor, own

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        index = hparams["client_index"]
        anchor, strength = pull_of_others(broadcast, index)
        own = Trajectory(client_state["weights"], anchor=anchor, prox_weight=hparams["prox_weight"] * strength)
        weights = local_sgd(own, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        return ClientResult(state={"weights": weights}, released={"row": weights})

    def server_update(state, aggregates):
        present = aggregates["row"]["present"] > 0

        def replace(old, new):
            # A client that has left keeps its last row.
            return tf.where(tf.reshape(present, [-1] + [1] * (old.shape.rank - 1)), new, old)

        rows = map_weights(replace, state["rows"], aggregates["row"]["rows"])
        return {"rows": rows, "relations": relations_between(rows, smallest_share, paper_covariance)}

    def init_server(weights):
        return {
            "rows": map_weights(lambda value: tf.stack([tf.convert_to_tensor(value)] * num_clients), weights),
            "relations": tf.eye(num_clients) * (1.0 / num_clients if paper_covariance else 1.0),
        }

    return Algorithm(
        name="mocha",
        title="Mocha",
        hparams={
            **LOCAL_TRAINING,
            "prox_weight": prox_weight(0.01, "related clients' weights"),
            "client_index": SET_BY_RUNTIME,
        },
        released={"row": "rows"},
        num_clients=num_clients,
        data_passes=1,
        init_server=init_server,
        broadcast=lambda state: {"rows": state["rows"], "relations": state["relations"]},
        init_client=lambda broadcast: {"weights": map_weights(lambda rows: rows[0], broadcast["rows"])},
        client_update=client_update,
        server_update=server_update,
        personalise=lambda broadcast, client_state: client_state["weights"],
        global_model=None,
    )


def relations_between(rows: Weights, smallest_share: float, paper_covariance: bool) -> tf.Tensor:
    """Returns the relations Omega, float32 `[clients, clients]`, from weights with a leading axis of clients."""
    matrix = tf.concat([tf.reshape(value, [value.shape[0], -1]) for value in rows.values()], axis=1)
    eigenvalues, eigenvectors = tf.linalg.eigh(tf.matmul(matrix, matrix, transpose_b=True))
    # Rounding makes zeros slightly negative; all are zero where every weight is.
    roots = tf.sqrt(tf.maximum(eigenvalues, 0.0)) + 1e-12
    floored = tf.maximum(roots, smallest_share * tf.reduce_mean(roots))
    if paper_covariance:
        scaled = floored / tf.reduce_sum(floored)
    else:
        scaled = 1.0 / floored
        scaled /= tf.reduce_mean(scaled)
    return tf.matmul(eigenvectors * scaled, eigenvectors, transpose_b=True)
